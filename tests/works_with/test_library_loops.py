"""The training loops of orbit, TF-models and Hugging Face with the wrapper."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from benchmarks.legacy_optimizers import CASES, SCALE, load, model_for

_needs_models = pytest.mark.library("official")

#: What makes the gradients of a batch overflow.
_OVERFLOW = math.inf


def _optimizer(model: Any) -> Any:
    case = CASES["TF-models: adamw, clipped"]
    return case.make(load(case.library), load(case.keras), model)


def _dataset(targets: list[float]) -> tf.data.Dataset:
    """Return batches for `model_for`; all rows of a batch have the same target."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    y = np.repeat(np.float32(targets), 8).reshape(-1, 8, 1)
    return tf.data.Dataset.from_tensor_slices((np.stack([x] * len(targets)), y))


def _weights(model: Any) -> list[np.ndarray]:
    return [weight.numpy() for weight in model.weights]


def _orbit_trainer(targets: list[float], *, is_wrapped: bool) -> Any:
    """Make a trainer whose steps are those of the documentation of Keras' own wrapper."""
    orbit = load("orbit")

    class Trainer(orbit.StandardTrainer):  # type: ignore[name-defined, misc] # orbit may be missing
        def __init__(self) -> None:
            super().__init__(_dataset(targets))
            self.model = model_for(load("keras"))
            inner = _optimizer(self.model)
            self.optimizer = tfmp.LossScaleOptimizer(inner, initial_scale=SCALE) if is_wrapped else inner
            self.global_step = orbit.utils.create_global_step()

        def train_step(self, iterator: Any) -> None:
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(x) - y))
                loss = self.optimizer.get_scaled_loss(loss) if is_wrapped else loss
            variables = self.model.trainable_variables
            grads = tape.gradient(loss, variables)
            grads = self.optimizer.get_unscaled_gradients(grads) if is_wrapped else grads
            self.optimizer.apply_gradients(zip(grads, variables, strict=True))
            self.global_step.assign_add(1)

    return Trainer()


@_needs_models
def test_orbits_controller_trains_and_resumes(tmp_path: Path) -> None:
    orbit = load("orbit")

    def train(targets: list[float], *, is_wrapped: bool, folder: Path | None = None) -> Any:
        trainer = _orbit_trainer(targets, is_wrapped=is_wrapped)
        manager = None
        if folder is not None:
            checkpoint = tf.train.Checkpoint(
                model=trainer.model, optimizer=trainer.optimizer, global_step=trainer.global_step
            )
            manager = tf.train.CheckpointManager(
                checkpoint, folder, 2, step_counter=trainer.global_step, checkpoint_interval=2
            )
        controller = orbit.Controller(
            trainer=trainer, global_step=trainer.global_step, steps_per_loop=2, checkpoint_manager=manager
        )
        controller.train(steps=int(trainer.global_step) + len(targets))
        if manager is not None:
            controller.save_checkpoint()
        return trainer

    bare = train([1.0, 2.0, 3.0, 4.0, 5.0], is_wrapped=False)
    whole = train([1.0, 2.0, 3.0, _OVERFLOW, 4.0, 5.0], is_wrapped=True)
    train([1.0, 2.0, 3.0, _OVERFLOW], is_wrapped=True, folder=tmp_path)
    resumed = train([4.0, 5.0], is_wrapped=True, folder=tmp_path)
    for trainer in (whole, resumed):
        for found, expected in zip(_weights(trainer.model), _weights(bare.model), strict=True):
            np.testing.assert_array_equal(found, expected)
        opt = trainer.optimizer
        assert (int(opt.iterations), int(trainer.global_step), float(opt.loss_scale)) == (5, 6, SCALE / 2)
    assert (int(whole.optimizer.applied_steps), int(whole.optimizer.skipped_steps)) == (5, 1)


@_needs_models
@pytest.mark.filterwarnings("default")
def test_trainer_of_models_scales_the_loss_as_for_keras_own_wrapper() -> None:
    core, keras = {name: load(f"official.core.{name}") for name in ("base_task", "base_trainer")}, load("keras")
    config_definitions = load("official.core.config_definitions")

    class Task(core["base_task"].Task):  # type: ignore[name-defined, misc] # TF-models may be missing
        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            raise NotImplementedError

        def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
            return tf.reduce_mean(tf.square(model_outputs - labels))

    def train(targets: list[float], *, is_wrapped: bool) -> tuple[Any, Any]:
        model = model_for(keras)
        opt = _optimizer(model)
        opt = tfmp.LossScaleOptimizer(opt, initial_scale=SCALE) if is_wrapped else opt
        config = config_definitions.ExperimentConfig(trainer=config_definitions.TrainerConfig())
        trainer = core["base_trainer"].Trainer(
            config, Task(config.task), model, opt, evaluate=False, train_dataset=_dataset(targets)
        )
        trainer.train(tf.constant(len(targets)))
        return model, opt

    bare, _ = train([1.0, 2.0, 3.0, 4.0], is_wrapped=False)
    model, opt = train([1.0, 2.0, _OVERFLOW, 3.0, 4.0], is_wrapped=True)
    for found, expected in zip(_weights(model), _weights(bare), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (4, 1, SCALE / 2)
