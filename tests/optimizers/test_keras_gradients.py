"""Gradients of every form and type, complex ones that are refused too, and calls of `apply` of Keras 3."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    for_every_keras,
    gradients,
    kernel_and_bias,
    optimizer,
    skip_before,
    take_step,
    values,
    variable,
    wrap,
)

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
    trained, expected = kernel_and_bias(keras), kernel_and_bias(keras)
    opt, built = (wrap(optimizer(keras, name, use_ema=True)) for _ in range(2))
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


_NO_COMPLEX = "it has no complex numbers"
_REFUSED = "{} is of type complex64, and loss scaling is for real numbers: train the real"
_MAKES = {"tf1": tf.compat.v1.train.GradientDescentOptimizer} | {
    name: keras.optimizers.SGD for name, keras in kerases.installed().items()
}


def _wrapped(inner: Any) -> tfmp.LossScaleOptimizer:
    return tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(8))


@pytest.mark.parametrize("host", _MAKES)
def test_complex_gradients_are_refused_by_name_or_number_and_their_parts_are_trained(host: str) -> None:
    phase = tf.Variable(tf.constant([1 + 2j], tf.complex64), name="phase")
    inner, accumulator = _MAKES[host](0.25), tfmp.GradientAccumulator([phase], 2)
    opt, scaler = _wrapped(inner), tfmp.GradScaler(8)
    grads = [tf.constant([1j], tf.complex64)]
    calls: dict[str, list[Callable[[], object]]] = {
        "the gradient of .*phase.*": [
            lambda: opt.minimize(lambda: tf.reduce_sum(tf.abs(phase) ** 2), var_list=[phase]),
            lambda: opt.apply_gradients(zip(grads, [phase], strict=True)),
            lambda: scaler.step(inner, zip(grads, [phase], strict=True)),
        ],
        "gradient 0": [
            lambda: scaler.unscale(inner, grads),
            lambda: accumulator.add(grads),
        ],
    }
    for which, call in ((which, each) for which, found in calls.items() for each in found):
        for run in (call, tf.function(call)):
            with pytest.raises(TypeError, match=_REFUSED.format(which)):
                run()
    assert phase.numpy().tolist() == [1 + 2j]
    parts = [tf.Variable([1.0]), tf.Variable([2.0])]
    _wrapped(_MAKES[host](0.25)).minimize(lambda: tf.reduce_sum(tf.abs(tf.complex(*parts)) ** 2), var_list=parts)
    assert [part.numpy().tolist() for part in parts] == [[0.5], [1.0]]


@for_every_keras()
def test_complex_gradients_are_refused_when_a_loop_unscales_them_and_by_fit(keras: ModuleType) -> None:
    skip_before((3, 6), keras, _NO_COMPLEX)
    with pytest.raises(TypeError, match=_REFUSED.format("gradient 0")):
        _wrapped(keras.optimizers.SGD(0.25)).get_unscaled_gradients([tf.constant([1j], tf.complex64)])

    class Rotation(keras.layers.Layer):  # type: ignore[name-defined, misc] # one of two packages
        def build(self, shape: Any) -> None:
            def initial(*_: Any, **__: Any) -> tf.Tensor:
                return tf.constant([1 + 2j], tf.complex64)

            self.phase = self.add_weight(name="phase", shape=[1], dtype="complex64", initializer=initial)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return tf.abs(tf.convert_to_tensor(self.phase)) * inputs

    model = keras.Sequential([Rotation()])
    model.compile(_wrapped(keras.optimizers.SGD(0.25)), "mse")
    with pytest.raises(TypeError, match=_REFUSED.format("the gradient of .*phase.*")):
        model.fit(np.ones([2, 1], np.float32), np.ones([2, 1], np.float32), verbose=0)


def test_scaler_that_is_not_enabled_trains_complex_variables() -> None:
    keras = next(iter(kerases.installed().values()))
    skip_before((3, 6), keras, _NO_COMPLEX)
    scaler, opt = tfmp.GradScaler(enabled=False), keras.optimizers.SGD(0.25)
    phase = tf.Variable(tf.constant([1 + 2j], tf.complex64), name="phase")
    grads = scaler.unscale(opt, [tf.constant([4j], tf.complex64)])
    scaler.step(opt, zip(grads, [phase], strict=True))
    scaler.update()
    assert phase.numpy().tolist() == [1 + 1j]
