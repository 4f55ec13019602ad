import copy
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kerases
import pytest
import tensorflow as tf

import tfmp

pytestmark = pytest.mark.essential


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(1.0)


def _overflow(scaler: tfmp.GradScaler) -> None:
    scaler.step(_sgd(), [(tf.constant(math.inf), tf.Variable(0.0))])


def test_state_dict_moves_the_state_to_another_scaler() -> None:
    scaler, other = (tfmp.GradScaler(1024, growth_interval=3) for _ in range(2))
    for grad in (math.inf, 8.0, 8.0):
        scaler.step(_sgd(), [(tf.constant(grad), tf.Variable(0.0))])
        scaler.update()
    assert scaler.state_dict() == {"loss_scale": 512.0, "good_steps": 2, "bad_steps": 0}
    # All numbers become floats, as they may in a JSON file.
    other.load_state_dict({name: float(value) for name, value in scaler.state_dict().items()})
    other.step(_sgd(), [(tf.constant(8.0), tf.Variable(0.0))])
    other.update()
    assert other.state_dict() == {"loss_scale": 1024.0, "good_steps": 0, "bad_steps": 0}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "keeps loss_scale, good_steps, bad_steps, got nothing"),
        ({"scale": 8.0, "_growth_tracker": 0}, "got scale, _growth_tracker: pass what state_dict"),
        ({"loss_scale": 16.0, "good_steps": "many", "bad_steps": 0}, "good_steps must be a number, got 'many'"),
        ({"loss_scale": math.nan, "good_steps": 0, "bad_steps": 0}, "loss_scale must be finite, got nan"),
        ({"loss_scale": -8.0, "good_steps": 0, "bad_steps": 0}, "loss_scale must be a float32 number of at least 1"),
        ({"loss_scale": 16.0, "good_steps": 0, "bad_steps": -1}, "bad_steps must be a whole number from 0"),
    ],
)
def test_wrong_state_is_refused_and_changes_nothing(state: dict[str, Any], message: str) -> None:
    scaler = tfmp.GradScaler(8)
    with pytest.raises((TypeError, ValueError), match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"loss_scale": 8.0, "good_steps": 0, "bad_steps": 0}


def test_disabled_scaler_takes_any_state() -> None:
    scaler = tfmp.GradScaler(enabled=False)
    scaler.load_state_dict({"loss_scale": 8.0})
    assert scaler.state_dict() == {}


def test_checkpoint_holds_the_managers_state_and_no_results_of_steps(tmp_path: Path) -> None:
    scaler = tfmp.GradScaler(1024)
    _overflow(scaler)
    scaler.update()
    # The iteration of this step has no update before the checkpoint is saved.
    _overflow(scaler)
    path = tf.train.Checkpoint(scaler=scaler).save(str(tmp_path / "checkpoint"))
    keys = [name for name, _ in tf.train.list_variables(path) if name.startswith("scaler")]
    assert keys == [
        f"scaler/manager/state/values/{name}/.ATTRIBUTES/VARIABLE_VALUE"
        for name in ("bad_steps", "good_steps", "loss_scale")
    ]
    # The checkpoint is restored before the other scaler takes a step.
    other = tfmp.GradScaler(8)
    tf.train.Checkpoint(scaler=other).restore(path).assert_consumed()
    assert float(other.loss_scale) == 512
    with pytest.raises(RuntimeError, match="call step first"):
        other.update()


def test_exported_module_trains(tmp_path: Path) -> None:
    class Trainer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaler, self.weight = tfmp.GradScaler(8), tf.Variable(0.0)
            self._optimizer = _sgd()

        @tf.function(input_signature=[tf.TensorSpec([])])
        def train(self, grad: tf.Tensor) -> tf.Tensor:
            self.scaler.step(self._optimizer, [(self.scaler.scale(grad), self.weight)])
            self.scaler.update()
            return self.scaler.loss_scale

    trainer = Trainer()
    trainer.train(tf.constant(math.inf))
    tf.saved_model.save(trainer, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert [float(loaded.train(tf.constant(grad))) for grad in (1.0, math.inf)] == [4, 2]
    assert float(loaded.weight) == -1


@kerases.for_every_keras()
def test_callback_shows_the_scaler_of_a_train_step(
    keras: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Model(keras.Model):
        def __init__(self, scaler: tfmp.GradScaler) -> None:
            super().__init__()
            # The scaler is in a tuple, because Keras would track it as an attribute.
            self.weight = tf.Variable(0.0, name="weight")
            self._train = (scaler,)

        def train_step(self, batch: Any) -> dict[str, Any]:
            (scaler,) = self._train
            scaler.step(self.optimizer, [(scaler.scale(tf.reduce_mean(batch)), self.weight)])
            scaler.update()
            return {"loss": tf.constant(0.0)}

    scaler = tfmp.GradScaler(8)
    model = Model(scaler)
    model.compile(keras.optimizers.SGD(1.0))
    callback = tfmp.LossScaleCallback(scaler=scaler, summary_dir=str(tmp_path))
    with caplog.at_level(logging.INFO, logger="tfmp"):
        history = model.fit(
            tf.constant([1.0, math.inf, 2.0]), batch_size=1, shuffle=False, verbose=0, callbacks=[callback]
        )
    assert (history.history["loss_scale"], history.history["skipped_steps"]) == ([4.0], [1])
    assert float(model.weight) == -3
    assert any("weight" in record.message and "1 inf" in record.message for record in caplog.records)
    assert list(tmp_path.iterdir())


def test_callback_refuses_anything_but_a_scaler() -> None:
    with pytest.raises(
        TypeError, match=r"scaler must be a tfmp.GradScaler or a tfmp.LossScaleOptimizer, got 8 of type int"
    ):
        tfmp.LossScaleCallback(scaler=8)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [({}, ""), ({"enabled": False}, "enabled=False, "), ({"is_distributed": True}, "is_distributed=True, ")],
)
def test_repr_shows_the_settings_that_are_not_the_default(settings: dict[str, bool], shown: str) -> None:
    assert repr(tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(8), **settings)) == (
        f"<tfmp.GradScaler({shown}<FixedLossScaleManager(loss_scale=8.0)>): applied_steps=0, skipped_steps=0>"
    )


_IN_ALL_WAYS = pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))],
    ids=["copy", "deepcopy", "pickle"],
)


@_IN_ALL_WAYS
@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 1024.0, "growth_interval": 3},
        {"manager": 8},
        {"manager": "log_max", "overflow_detector": tfmp.SaturationDetector()},
        {"init_scale": 1024.0, "skip_spikes": tfmp.SpikeDetector(max_norm=100.0)},
        {"enabled": False},
    ],
    ids=["exponential", "fixed", "log_max", "spikes", "disabled"],
)
def test_copy_goes_on_from_the_same_state_by_itself(copied: Callable[..., Any], settings: dict[str, Any]) -> None:
    scaler = tfmp.GradScaler(**copy.deepcopy(settings))

    def step(scaler: Any, *grads: float) -> list[Any]:
        optimizer, weight = _sgd(), tf.Variable(0.0)
        for grad in grads:
            scaler.step(optimizer, [(scaler.scale(tf.constant(grad)), weight)])
            scaler.update()
        return [float(weight), *map(float, (scaler.loss_scale, scaler.applied_steps, scaler.skipped_steps))]

    step(scaler, math.inf, 1.0, 2.0, 1e6)
    made = copied(scaler)
    assert (type(made), repr(made)) == (tfmp.GradScaler, repr(scaler))
    assert made.state_dict() == scaler.state_dict()
    assert bool(made.last_step_finite) == bool(scaler.last_step_finite)
    before = repr(scaler)
    after = step(made, 1.0, math.inf, 2.0)
    assert repr(scaler) == before
    assert step(scaler, 1.0, math.inf, 2.0) == after


@_IN_ALL_WAYS
def test_copy_shares_no_detector(copied: Callable[..., Any]) -> None:
    scaler = tfmp.GradScaler(8, skip_spikes=tfmp.SpikeDetector(), overflow_detector=tfmp.SaturationDetector())
    made, before = copied(scaler), scaler.state_dict()
    weight = tf.Variable(0.0)
    made.step(_sgd(), [(made.scale(tf.constant(2.0)), weight)])
    made.update()
    assert (scaler.state_dict(), made.state_dict() == before) == (before, False)
    assert made.spike_detector is not scaler.spike_detector
    assert made._overflow_detector is not scaler._overflow_detector


@_IN_ALL_WAYS
@pytest.mark.parametrize("compiled", [False, True])
def test_scaler_is_not_copied_within_an_iteration(copied: Callable[..., Any], compiled: bool) -> None:
    scaler = tfmp.GradScaler(8)
    unscale = lambda: scaler.unscale(_sgd(), [tf.constant(8.0)])  # noqa: E731 - one line
    (tf.function(unscale) if compiled else unscale)()
    with pytest.raises(RuntimeError, match=r"^a tfmp.GradScaler is pickled or copied between iterations: call update"):
        copied(scaler)
    scaler.update()
    copied(scaler)


class _Halving(tfmp.LossScaleManager):  # type: ignore[misc] # of any type
    """A manager of a user, without get_config."""

    def __init__(self) -> None:
        self.scale = tf.Variable(64.0, trainable=False)

    def get_loss_scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.scale)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        return self.scale.assign(tf.where(finite_grads, self.scale, self.scale / 2))


@_IN_ALL_WAYS
def test_manager_of_a_user_is_copied_as_it_is(copied: Callable[..., Any]) -> None:
    scaler = tfmp.GradScaler(manager=_Halving())
    _overflow(scaler)
    scaler.update()
    made = copied(scaler)
    _overflow(made)
    made.update()
    assert [float(each.loss_scale) for each in (scaler, made)] == [32, 16]
    assert [int(each.skipped_steps) for each in (scaler, made)] == [1, 2]
