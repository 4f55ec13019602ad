"""The optimizers of Hugging Face, Addons and TF-models, and TF-models' trainer: a skipped step changes nothing."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from benchmarks.legacy_optimizers import CASES, SCALE, STEPS, Case, Run, factors, load, model_for, train

#: Which of these libraries a test needs.
_needs_addons = pytest.mark.library("tensorflow_addons")
_needs_models = pytest.mark.library("official")

_rows = [pytest.param(case, id=name, marks=pytest.mark.library(case.library)) for name, case in CASES.items()]


def _wrapped(opt: Any) -> Any:
    return tfmp.LossScaleOptimizer(opt, initial_scale=SCALE)


def _assert_same(one: Run, other: Run) -> None:
    for found, expected in zip([*one.weights, *one.state], [*other.weights, *other.state], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("case", _rows)
def test_overflow_leaves_what_the_bare_optimizer_has_without_that_step(case: Case, compiled: bool) -> None:
    bare = train(case, None, factors=factors(0.0), compiled=compiled)
    run = train(case, tfmp.LossScaleOptimizer, factors=factors(math.inf), compiled=compiled)
    before, after = run.around_overflow
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old)
    _assert_same(run, bare)
    opt = run.optimizer
    counts = (int(opt.applied_steps), int(opt.skipped_steps), int(opt.iterations), float(opt.loss_scale))
    assert counts == (STEPS - 1, 1, STEPS - 1, SCALE / 2)


@pytest.mark.parametrize("case", _rows)
def test_overflow_in_the_first_step_leaves_the_bare_optimizer_at_its_beginning(case: Case) -> None:
    """Here the step that is traced first is skipped, and some optimizers start their slots in their first step."""
    bare = train(case, None, factors=factors(0.0, at=0), compiled=True)
    _assert_same(train(case, tfmp.LossScaleOptimizer, factors=factors(math.inf, at=0), compiled=True), bare)


@_needs_addons
@pytest.mark.parametrize("name", ["AdamW", "SGDW"])
@pytest.mark.parametrize("by", ["apply_gradients", "minimize"])
def test_decay_var_list_reaches_the_optimizer(name: str, by: str) -> None:
    def trained(wrap: Callable[[Any], Any], factors: Sequence[float], by: str) -> list[list[float]]:
        opt = CASES[f"Addons: {name}"].make(load("tensorflow_addons"), load("keras"), None)
        opt.weight_decay = 0.5
        opt, weights = wrap(opt), [tf.Variable([1.0, -2.0]), tf.Variable([3.0, 4.0])]
        for factor in factors:
            if by == "minimize":
                opt.minimize(lambda: tf.reduce_sum(weights) * factor, weights, decay_var_list=weights[:1])  # noqa: B023
            else:
                scale = opt.loss_scale if isinstance(opt, tfmp.LossScaleOptimizer) else 1.0
                grads = [tf.ones([2]) * (factor * scale)] * 2
                grads = opt.get_unscaled_gradients(grads) if isinstance(opt, tfmp.LossScaleOptimizer) else grads
                opt.apply_gradients(zip(grads, weights, strict=True), decay_var_list=weights[:1])
        return [weight.numpy().tolist() for weight in weights]

    # The `minimize` of these classes itself forgets `decay_var_list` before it applies the gradients.
    expected = trained(lambda opt: opt, [1.0, 1.0], "apply_gradients")
    assert trained(_wrapped, [1.0, math.inf, 1.0], by) == expected
    # The first variable shrank by half in each of two steps; the second one moved by the gradients alone.
    assert abs(expected[0][1]) < 1
    assert expected[1][1] > 3.5


@_needs_addons
@pytest.mark.parametrize("name", ["Lookahead", "SWA", "MovingAverage"])
def test_wrapper_inside_one_of_addons_is_refused_with_the_right_order(name: str) -> None:
    addons, keras = load("tensorflow_addons"), load("keras")
    around = getattr(addons.optimizers, name)(tfmp.LossScaleOptimizer(keras.optimizers.legacy.Adam()))
    weight = tf.Variable(2.0)
    with pytest.raises(ValueError, match=r"outermost.*write.*tfmp.LossScaleOptimizer\(Lookahead\(Adam\(\.\.\.\)\)\)"):
        around.apply_gradients([(tf.constant(1.0), weight)])
    assert float(weight) == 2


@_needs_addons
@_needs_models
@pytest.mark.parametrize("name", ["MultiOptimizer", "ExponentialMovingAverage"])
def test_wrapper_inside_one_that_calls_its_steps_warns_that_nothing_scales_the_loss(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    keras = load("keras")
    model = model_for(keras)
    inner = tfmp.LossScaleOptimizer(keras.optimizers.legacy.SGD(0.5))
    if name == "MultiOptimizer":
        around = load("tensorflow_addons").optimizers.MultiOptimizer([(inner, model.layers)])
    else:
        around = load("official.modeling.optimization").ExponentialMovingAverage(inner)
        around.shadow_copy(model)
    variables = model.trainable_variables
    with caplog.at_level(logging.WARNING, logger="tfmp"):
        around.apply_gradients([(tf.ones_like(variable), variable) for variable in variables])
    assert "get_scaled_loss was not called before" in caplog.text


@_needs_addons
def test_averages_are_assigned_by_the_inner_optimizer() -> None:
    case = CASES["Addons: SWA"]
    bare = train(case, None, factors=factors(0.0), compiled=True)
    run = train(case, tfmp.LossScaleOptimizer, factors=factors(math.inf), compiled=True)
    bare.optimizer.assign_average_vars(bare.variables)
    run.optimizer.inner_optimizer.assign_average_vars(run.variables)
    for found, expected, last in zip(run.variables, bare.variables, run.weights, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert np.any(found.numpy() != last)


@pytest.mark.library("tf_keras")
@_needs_addons  # which needs a `keras` that is Keras 2
@pytest.mark.parametrize(("of_model", "of_optimizer"), [("keras", "tf_keras"), ("tf_keras", "keras")])
def test_optimizer_of_the_other_copy_of_keras_is_named_in_the_error(of_model: str, of_optimizer: str) -> None:
    """Keras raises the error, which contains the optimizer's `repr`."""
    model = model_for(load(of_model))
    opt = tfmp.LossScaleOptimizer(load(of_optimizer).optimizers.legacy.Adam())
    with pytest.raises(ValueError, match=f"interpret optimizer.*LossScaleOptimizer.Adam of {of_optimizer},"):
        model.compile(opt, "mse")


@_needs_models
@pytest.mark.filterwarnings("default")
def test_trainer_of_models_scales_the_loss_as_for_keras_own_wrapper() -> None:
    base_task, base_trainer = (load(f"official.core.{name}") for name in ("base_task", "base_trainer"))
    config_definitions, case = load("official.core.config_definitions"), CASES["TF-models: adamw, clipped"]

    class Task(base_task.Task):  # type: ignore[name-defined, misc] # TF-models may be missing
        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            raise NotImplementedError

        def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
            return tf.reduce_mean(tf.square(model_outputs - labels))

    def trained(wrap: Callable[[Any], Any], targets: Sequence[float]) -> tuple[list[np.ndarray], Any]:
        x, y = np.ones([len(targets), 8, 3], np.float32), np.repeat(np.float32(targets), 8).reshape(-1, 8, 1)
        model = model_for(load("keras"))
        opt = wrap(case.make(load(case.library), load(case.keras), model))
        config = config_definitions.ExperimentConfig(trainer=config_definitions.TrainerConfig())
        data = tf.data.Dataset.from_tensor_slices((x, y))
        trainer = base_trainer.Trainer(config, Task(config.task), model, opt, evaluate=False, train_dataset=data)
        trainer.train(tf.constant(len(targets)))
        return [weight.numpy() for weight in model.weights], opt

    bare, _ = trained(lambda opt: opt, [1.0, 2.0, 3.0, 4.0])
    found, opt = trained(_wrapped, [1.0, 2.0, math.inf, 3.0, 4.0])
    for one, other in zip(found, bare, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (4, 1, SCALE / 2)
