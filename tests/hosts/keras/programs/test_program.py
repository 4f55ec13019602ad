"""The program that unscales, clips and applies the gradients of a Keras 3 optimizer."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    assert_trains_as,
    compiles,
    gradients,
    kernel_and_bias,
    optimizer,
    optimizer_names,
    values,
    variable,
    wrap,
)

import tfmp

pytestmark = pytest.mark.essential

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_compiled_training_that_clips_and_accumulates_equals_training_without_wrapper(name: str) -> None:
    # `test_keras_conformance.py` trains with each option alone.
    options = {"global_clipnorm": 0.5, "gradient_accumulation_steps": 2}
    manager = tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000, 1, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(optimizer(keras, name, **options), manager, jit_compile=True)
    assert_trains_as(optimizer(keras, name, **options), opt, keras, tf.function)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in optimizer_names(keras)),
        # The wrapper does the clipping for all optimizers, so a few of them suffice.
        *((name, {"global_clipnorm": 0.5}) for name in ("SGD", "AdamW", "MultiOptimizer")),
    ],
)
@pytest.mark.essential("Ftrl", "MultiOptimizer", "Muon", "SGD", "ScheduleFreeAdamW")
def test_compiled_update_treats_sparse_gradients_as_keras_does(name: str, options: dict[str, Any]) -> None:
    plain, plain_variables = optimizer(keras, name, **options), [variable(keras, np.ones([5, 2]))]
    variables = [variable(keras, np.ones([5, 2]))]
    manager = tfmp.FixedLossScaleManager(SCALE)
    opt = tfmp.LossScaleOptimizer(optimizer(keras, name, **options), manager, jit_compile=True)
    opt.build(variables)

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)])
    def step(rows: tf.Tensor, indices: tf.Tensor) -> None:
        opt.apply([tf.IndexedSlices(rows * SCALE, indices, tf.constant([5, 2]))], variables)

    # XLA would compile again for another number of rows: `test_keras3_compilation.py` has many.
    for indices in ([1, 1, 4], [0, 2, 3], [3, 1, 3]):
        rows = np.arange(2.0 * len(indices), dtype=np.float32).reshape(-1, 2)
        plain.apply([tf.IndexedSlices(tf.constant(rows), tf.constant(indices), tf.constant([5, 2]))], plain_variables)
        step(rows, np.int32(indices))
        np.testing.assert_allclose(variables[0].numpy(), plain_variables[0].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("lowest", "highest"), [(1.0, 2.0), (-2.0, -1.0), (-1.0, 1.0)])
def test_rows_that_a_program_adds_to_sparse_gradients_stay_zero_when_values_are_clipped(
    lowest: float, highest: float
) -> None:
    (weight,) = variables = [variable(keras, np.zeros([4]))]
    manager = tfmp.FixedLossScaleManager(SCALE)
    opt = tfmp.LossScaleOptimizer(optimizer(keras, learning_rate=1.0), manager, jit_compile=True)
    opt.build(variables)

    def step(values: tf.Tensor) -> None:
        scaled = tf.IndexedSlices(values * SCALE, tf.constant([3, 1, 0]), tf.constant([4]))
        clipped = tfmp.clip_by_value(opt.get_unscaled_gradients([scaled]), lowest, highest)
        opt.apply(clipped, variables)

    tf.function(step)(tf.constant([0.5, -3.0, 5.0]))
    np.testing.assert_allclose(-weight.numpy(), [highest, lowest, 0, np.clip(0.5, lowest, highest)])


def test_clipping_is_correct_if_the_squares_of_the_norm_overflow() -> None:
    (weight,) = variables = [variable(keras, [0, 0])]
    opt = tfmp.LossScaleOptimizer(
        keras.optimizers.SGD(1.0, global_clipnorm=1.0), tfmp.FixedLossScaleManager(1024.0), jit_compile=True
    )
    opt.build(variables)
    tf.function(lambda: opt.apply([tf.constant([3e28, -4e28])], variables))()
    np.testing.assert_allclose(weight.numpy(), [-0.6, 0.8], rtol=1e-6)


def test_some_of_the_variables_are_updated_by_a_program_of_their_own() -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), jit_compile=True)
    kernel, bias = variables = kernel_and_bias(keras)
    opt.build(variables)

    def step() -> None:
        opt.apply([tf.constant([8.0, 16.0])], [bias])

    assert compiles(step)
    step()
    assert values([kernel, bias]) == [[[1, 2], [3, 4]], [4.5, 5]]


def test_function_that_is_traced_again_uses_changed_settings() -> None:
    inner = keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(1.0, 10, 1.0), clipvalue=1.0)
    (weight,) = variables = [variable(keras, [0.0])]
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1), jit_compile=True)
    opt.build(variables)
    seen = []
    for clipvalue, rate in [(1.0, 1.0), (3.0, 1.0), (np.float64(2.0), 0.5)]:
        inner.clipvalue = clipvalue
        opt.learning_rate = keras.optimizers.schedules.PolynomialDecay(rate, 10, rate)
        weight.assign([0.0])
        tf.function(lambda: opt.apply([tf.constant([4.0])], variables))()
        seen.append(float(weight.numpy()[0]))
    assert seen == [-1, -3, -1]


@pytest.mark.parametrize("jit_compile", [True, False])
@pytest.mark.parametrize("norms", [{"global_clipnorm": -1.0}, {"clipnorm": -1.0, "global_clipnorm": 5.0}])
def test_norms_that_keras_ignores_are_ignored(norms: dict[str, float], jit_compile: bool) -> None:
    inner, plain = keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0)
    for each in (inner, plain):
        for name, norm in norms.items():
            setattr(each, name, norm)
        each.clipvalue = 0.5
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1), jit_compile=jit_compile)
    (weight,), (plain_weight,) = variables, plain_variables = [variable(keras, [0, 0])], [variable(keras, [0, 0])]
    opt.build(variables)
    grads = [tf.constant([6.0, 8.0])]
    tf.function(lambda: opt.apply(grads, variables))()
    plain.apply(grads, plain_variables)
    np.testing.assert_allclose(weight.numpy(), plain_weight.numpy(), rtol=1e-6)


def test_functions_that_run_eagerly_take_the_same_steps() -> None:
    opt, variables = wrap(optimizer(keras)), kernel_and_bias(keras)
    tf.config.run_functions_eagerly(True)
    try:
        tf.function(lambda: opt.apply([tf.fill([2, 2], SCALE), tf.fill([2], SCALE)], variables))()
    finally:
        tf.config.run_functions_eagerly(False)
    assert values(variables) == [[[0.5, 1.5], [2.5, 3.5]], [4.5, 5.5]]


def test_clipping_does_not_change_the_inner_optimizer() -> None:
    inner = keras.optimizers.SGD(1.0, global_clipnorm=5.0)
    variables = kernel_and_bias(keras)
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1), jit_compile=True)
    opt.build(variables)
    tf.function(lambda: opt.apply(gradients(0), variables))()
    assert inner.global_clipnorm == 5
    assert int(inner.iterations) == 1
