"""Gradients of every form and type that a wrapped optimizer of Keras is given, and calls of `apply` of Keras 3."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, gradients, kernel_and_bias, optimizer, take_step, values, variable, wrap

import tfmp


def _apply_scaled(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    """Apply gradients as if they were those of a scaled loss."""
    opt.scale_loss(tf.constant(1.0))
    opt.apply_gradients(zip(grads, variables, strict=True))


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@for_every_keras()
def test_variable_without_gradient_does_not_even_decay(keras: ModuleType) -> None:
    variables = kernel_and_bias(keras)
    _apply_scaled(wrap(optimizer(keras, weight_decay=0.5)), [None, tf.constant([SCALE, 0])], variables)
    assert values(variables) == [[[1, 2], [3, 4]], [5 - 0.25 * 5 - 0.5, 6 - 0.25 * 6]]


@for_every_keras()
def test_sparse_gradients_stay_sparse_in_loops_and_fit(keras: ModuleType) -> None:
    seen: list[Any] = []

    class Recording(keras.optimizers.SGD):  # type: ignore[name-defined, misc] # one of two packages
        def update_step(self, gradient: Any, *args: Any) -> None:
            seen.append(type(gradient))
            super().update_step(gradient, *args)

    table, opt = variable(keras, np.ones([4, 1])), wrap(Recording(0.5))
    for rows in ([SCALE, 2 * SCALE], [np.inf, 0]):
        slices = tf.IndexedSlices(np.float32(rows).reshape(2, 1), tf.constant([1, 2]), tf.constant([4, 1]))
        _apply_scaled(opt, [slices], [table])
        assert table.numpy().ravel().tolist() == [1, 0.5, 0, 1]
    assert int(opt.skipped_steps) == 1
    model = keras.Sequential([keras.Input([1]), keras.layers.Embedding(4, 1, embeddings_initializer="ones")])
    model.compile(wrap(Recording(0.5)), loss=lambda target, output: output, jit_compile=False)
    model.fit(np.array([[1], [3]]), np.ones([2, 1]), verbose=0)
    assert model.get_weights()[0].ravel().tolist() == [1, 0.75, 1, 0.75]
    assert set(seen) == {tf.IndexedSlices}


@pytest.mark.parametrize(
    ("dtype", "scale", "grad", "expected"),
    [
        # In float16 the reciprocal of this scale is 0.
        ("float16", 2.0**25, tf.constant([2.0**15, 0.0], tf.float16), [1 - 2.0**-11, 2]),
        ("bfloat16", SCALE, tf.constant([SCALE, 0.0], tf.bfloat16), [0.5, 2]),
        ("float64", SCALE, tf.constant([SCALE, 0.0], tf.float64), [0.5, 2]),
        ("float32", SCALE, tf.constant([SCALE, 0.0], tf.float16), [0.5, 2]),
        ("float32", SCALE, tf.constant([SCALE, 0.0], tf.float64), [0.5, 2]),
        # These are finite, and overflow the type of their variable when they are cast.
        ("float16", SCALE, tf.constant([SCALE * 2.0**16, 0.0]), None),
        ("float32", SCALE, tf.constant([1e45, 0], tf.float64), None),
    ],
    ids=str,
)
@for_every_keras()
def test_gradients_are_unscaled_and_checked_in_the_type_of_their_variable(
    keras: ModuleType, dtype: str, scale: float, grad: tf.Tensor, expected: Any
) -> None:
    if dtype == "float32" and grad.dtype == tf.float64 and keras.__version__.startswith("2."):
        pytest.skip("Keras 2 does not cast")
    weight, opt = variable(keras, [1, 2], dtype=dtype), wrap(optimizer(keras), init_loss_scale=scale)
    _apply_scaled(opt, [grad], [weight])
    found = np.float64(weight.numpy()).tolist()
    assert (found, int(opt.skipped_steps)) == (expected or [1, 2], expected is None)


@pytest.mark.parametrize(
    ("make_manager", "detector", "scale"),
    [
        (lambda: tfmp.FixedLossScaleManager(1024), tfmp.NonFiniteDetector(), 1024),
        (lambda: tfmp.FixedLossScaleManager(1024), tfmp.SaturationDetector(dtype="float8_e4m3fn"), 1024),
        # The largest gradient is 0.25, and 65504 / 0.25 is between 2**17 and 2**18.
        (lambda: tfmp.LogMaxLossScaleManager(init_loss_scale=1024), tfmp.NonFiniteDetector(), 2**17),
    ],
    ids=["non-finite", "saturation", "log max"],
)
@for_every_keras("keras3")
def test_gradient_that_overwrites_its_variable_is_not_unscaled_and_checked_only_for_finiteness(
    keras: ModuleType, make_manager: Any, detector: tfmp.OverflowDetector, scale: float
) -> None:
    variables = [variable(keras, [1, 2]), variable(keras, 1.0)]
    variables[1].overwrite_with_gradient = True
    opt = tfmp.LossScaleOptimizer(optimizer(keras), make_manager(), overflow_detector=detector)
    opt.apply([tf.constant([0.0, 256.0]), tf.constant(2.0**20)], variables)
    assert ([each.numpy().tolist() for each in variables], int(opt.skipped_steps)) == ([[1, 1.875], 2.0**20], 0)
    assert float(opt.loss_scale) == scale
    opt.apply([tf.zeros([2]), tf.constant(math.nan)], variables)
    assert int(opt.skipped_steps) == 1
    (report,) = opt.overflow_reports()
    assert report.last.numpy().tolist() == [[0, 0, 0], [0, 1, 0]]


@for_every_keras("keras3")
def test_custom_detector_gets_unscaled_gradients(keras: ModuleType) -> None:
    seen = []

    class Detector(tfmp.OverflowDetector):
        def all_finite(self, grads: Any, loss_scale: tf.Tensor) -> tf.Tensor:
            seen.append(([grad.numpy().tolist() for grad in grads], float(loss_scale)))
            return tf.constant(True)

    variables = [variable(keras, [1, 2])]
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), overflow_detector=Detector())
    opt.apply([tf.constant([8.0, 16.0])], variables)
    assert seen == [([[1, 2]], 8)]


@for_every_keras("keras3")
def test_apply_defaults_to_the_variables_of_build(keras: ModuleType) -> None:
    (weight,) = variables = [variable(keras, [1, 2])]
    opt = wrap(optimizer(keras))
    opt.build(variables)
    opt.apply([tf.constant([SCALE, 0])])
    assert weight.numpy().tolist() == [0.5, 2]


@for_every_keras()
def test_empty_list_of_gradients_takes_no_step_as_in_keras(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    if keras.__version__.startswith("3."):
        opt.apply([], [])
        assert not opt.built
    else:
        assert opt.apply_gradients([]) is opt.iterations
        assert opt.compute_gradients(lambda: tf.constant(1.0), []) == []
    assert int(opt.applied_steps) == 0


@pytest.mark.parametrize("name", ["SGD", "Adam", "Ftrl", "MultiOptimizer"])
@for_every_keras("keras3")
def test_function_that_builds_the_optimizer_is_traced_once(keras: ModuleType, name: str) -> None:
    trained, opt = kernel_and_bias(keras), wrap(optimizer(keras, name, use_ema=True))
    expected, built = kernel_and_bias(keras), wrap(optimizer(keras, name, use_ema=True))
    built.build(expected)
    traces = []

    @tf.function
    def traced() -> None:
        traces.append(opt)
        take_step(opt, trained, gradients(0))

    for _ in range(2):
        traced()
        take_step(built, expected, gradients(0))
    assert traces == [opt]
    assert [each.name for each in opt.variables] == [each.name for each in built.variables]
    for each, other in zip([*trained, *opt.variables], [*expected, *built.variables], strict=True):
        np.testing.assert_allclose(each.numpy(), other.numpy(), rtol=1e-6)
