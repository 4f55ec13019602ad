"""The optimizers of Hugging Face, TensorFlow Addons and TF-models in the wrapper: a skipped step changes nothing."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from benchmarks import legacy_optimizers
from benchmarks.legacy_optimizers import CASES, SCALE, STEPS, Case, Run, factors, load, model_for, train

#: Which of these libraries a test needs.
_needs_addons = pytest.mark.library("tensorflow_addons")
_needs_models = pytest.mark.library("official")

_rows = [pytest.param(case, id=name, marks=pytest.mark.library(case.library)) for name, case in CASES.items()]


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


@pytest.mark.library("transformers")
@_needs_addons
@_needs_models
def test_keras_own_wrapper_counts_the_skipped_step() -> None:
    """The table of the documentation: schedules and bias corrections advance, and the clipping of TF-models is off."""
    found = {}
    for name in ("transformers: create_optimizer", "Addons: AdamW", "TF-models: adam", "TF-models: adamw, clipped"):
        case = CASES[name]
        own = load(case.keras).mixed_precision.LossScaleOptimizer
        bare = train(case, None, factors=factors(0.0, at=0), compiled=True)
        run = train(case, own, factors=factors(math.inf, at=0), compiled=True)
        found[name] = legacy_optimizers.difference(run, bare)
    assert min(found.values()) > 1e-3


@_needs_models
def test_adamw_of_models_clips_in_tfmp_and_not_in_keras_own_wrapper() -> None:
    clipped, not_clipped = CASES["TF-models: adamw, clipped"], CASES["TF-models: adamw"]
    ones = factors(1.0)
    own = load("keras").mixed_precision.LossScaleOptimizer
    bare, bare_not_clipped = (train(case, None, factors=ones, compiled=True) for case in (clipped, not_clipped))
    assert legacy_optimizers.difference(bare, bare_not_clipped) > 1e-3
    _assert_same(train(clipped, tfmp.LossScaleOptimizer, factors=ones, compiled=True), bare)
    _assert_same(train(clipped, own, factors=ones, compiled=True), bare_not_clipped)


@_needs_addons
def test_multi_optimizer_fails_in_keras_own_wrapper_if_the_first_step_overflows() -> None:
    case = CASES["Addons: MultiOptimizer"]
    own = load(case.keras).mixed_precision.LossScaleOptimizer
    with pytest.raises(tf.errors.InvalidArgumentError):
        train(case, own, factors=factors(math.inf, at=0), compiled=True)


@_needs_addons
@pytest.mark.parametrize("name", ["AdamW", "SGDW"])
@pytest.mark.parametrize("by", ["apply_gradients", "minimize"])
def test_decay_var_list_reaches_the_optimizer(name: str, by: str) -> None:
    make = CASES[f"Addons: {name}"].make
    addons, keras = load("tensorflow_addons"), load("keras")
    ends = []
    for is_wrapped in (False, True):
        opt = make(addons, keras, None)
        opt.weight_decay = 0.5
        opt = tfmp.LossScaleOptimizer(opt, initial_scale=SCALE) if is_wrapped else opt
        weights = [tf.Variable([1.0, -2.0]), tf.Variable([3.0, 4.0])]
        for factor in (1.0, math.inf, 1.0):
            if math.isinf(factor) and not is_wrapped:
                continue

            def loss(weights: list[tf.Variable] = weights, factor: float = factor) -> tf.Tensor:
                return tf.add_n([tf.reduce_sum(weight) for weight in weights]) * factor

            if by == "minimize" and is_wrapped:
                # The `minimize` of these classes forgets `decay_var_list` before it applies the gradients.
                opt.minimize(loss, weights, decay_var_list=weights[:1])
                continue
            with tf.GradientTape() as tape:
                value = loss()
                value = opt.get_scaled_loss(value) if is_wrapped else value
            grads = tape.gradient(value, weights)
            grads = opt.get_unscaled_gradients(grads) if is_wrapped else grads
            opt.apply_gradients(zip(grads, weights, strict=True), decay_var_list=weights[:1])
        ends.append([weight.numpy().tolist() for weight in weights])
    assert ends[0] == ends[1]
    # The first variable shrank by half in each of two steps; the second one moved by the gradients alone.
    assert abs(ends[1][0][1]) < 1
    assert ends[1][1][1] > 3.5


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
def test_sparse_gradients_reach_lazy_adam_sparse() -> None:
    addons = load("tensorflow_addons")
    ends = []
    for is_wrapped in (False, True):
        opt: Any = addons.optimizers.LazyAdam(0.125)
        opt = tfmp.LossScaleOptimizer(opt, initial_scale=SCALE) if is_wrapped else opt
        table = tf.Variable(tf.ones([4, 2]))

        @tf.function
        def step(
            rows: tf.Tensor, factor: tf.Tensor, opt: Any = opt, table: Any = table, scales: Any = is_wrapped
        ) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows) ** 2) * factor
                loss = opt.get_scaled_loss(loss) if scales else loss
            grads = tape.gradient(loss, [table])
            opt.apply_gradients(zip(opt.get_unscaled_gradients(grads) if scales else grads, [table], strict=True))

        for rows, factor in (([0, 1], 1.0), ([1, 2], math.inf), ([1, 1], 1.0), ([0, 2], 1.0)):
            if is_wrapped or not math.isinf(factor):
                step(tf.constant(rows), tf.constant(factor))
        ends.append([table.numpy(), opt.get_slot(table, "m").numpy(), opt.get_slot(table, "v").numpy()])
    for found, expected in zip(ends[1], ends[0], strict=True):
        np.testing.assert_array_equal(found, expected)
    # LazyAdam leaves the rows alone that no gradient is for.
    assert ends[1][0][3].tolist() == [1, 1]


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
