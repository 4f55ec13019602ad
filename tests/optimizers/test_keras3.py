"""Behavior that only the front-end for Keras 3 has."""

import math
import sys
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    fit_linear,
    gradients,
    kernel_and_bias,
    linear_model,
    optimizer,
    take_step,
    values,
    variable,
    wrap,
)

import tfmp

pytestmark = pytest.mark.essential

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)


def test_horovod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Horovod 0.28.1 does not support Keras 3, so this test uses a stand-in for the module.
    horovod = types.ModuleType("horovod.tensorflow")
    horovod.is_initialized, horovod.size = lambda: True, lambda: 2
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), is_distributed=True)
    with pytest.raises(NotImplementedError, match=r"not for those of Keras 3: .*MultiWorkerMirroredStrategy"):
        take_step(opt, kernel_and_bias(keras), [tf.ones([2, 2]), tf.ones([2])])


def test_gradient_that_overwrites_its_variable_is_not_unscaled() -> None:
    variables = kernel_and_bias(keras)
    variables[1].overwrite_with_gradient = True
    opt = wrap(optimizer(keras))
    opt.apply([tf.constant([[SCALE, 0], [0, 0]]), tf.constant([7.0, 8.0])], variables)
    assert values(variables) == [[[0.5, 2], [3, 4]], [7, 8]]


@pytest.mark.parametrize("steps", [2, 3])
def test_overflow_while_the_inner_optimizer_accumulates_drops_only_that_step(steps: int) -> None:
    opt = wrap(optimizer(keras, gradient_accumulation_steps=steps))
    variables = kernel_and_bias(keras)
    plain, plain_variables = optimizer(keras, gradient_accumulation_steps=steps), kernel_and_bias(keras)
    for seed, last in enumerate([None, math.inf, None, None, math.nan, None, None, None]):
        take_step(opt, variables, gradients(seed, last))
        if last is None:
            take_step(plain, plain_variables, gradients(seed))
        assert values(variables) == values(plain_variables)
        assert int(opt.iterations) == int(plain.iterations)
    assert int(opt.iterations) == 6 // steps


def test_keras_callback_swaps_in_the_moving_averages() -> None:
    model = linear_model(keras, wrap(optimizer(keras, use_ema=True, ema_momentum=0.5)))
    seen = []

    class Seeing(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            seen.extend(values(model.weights))

    callbacks = [keras.callbacks.SwapEMAWeights(), Seeing()]
    x = np.ones([1, 1], np.float32)
    fit_linear(model, [2, math.inf, 4], callbacks=callbacks, validation_data=(x, x))
    # The weight is -1 and then -3, and the average with momentum 0.5 is -2.
    assert seen == [[[-2]]]


def test_skipped_step_changes_no_optimizer_of_a_multi_optimizer() -> None:
    inner = optimizer(keras, "MultiOptimizer")
    opt = wrap(inner)
    variables = kernel_and_bias(keras)
    for last in (None, math.inf, None, math.nan):
        take_step(opt, variables, gradients(0, last))
    assert [int(each.iterations) for each in (*inner.optimizers, inner, opt)] == [2, 2, 2, 2]
    with pytest.raises(AttributeError, match="Learning rate cannot be accessed on a MultiOptimizer"):
        _ = opt.learning_rate


def test_apply_defaults_to_the_variables_of_build() -> None:
    (weight,) = variables = [variable(keras, [1, 2])]
    opt = wrap(optimizer(keras))
    opt.build(variables)
    opt.apply([tf.constant([SCALE, 0])])
    assert weight.numpy().tolist() == [0.5, 2]


def test_apply_without_variables_before_build_is_refused() -> None:
    with pytest.raises(ValueError, match="not built yet: pass trainable_variables"):
        wrap(optimizer(keras)).apply(gradients(0))


@pytest.mark.parametrize("name", ["SGD", "Adam", "Ftrl", "MultiOptimizer"])
def test_function_that_builds_the_optimizer_is_traced_once(name: str) -> None:
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


def test_empty_list_of_gradients_takes_no_step_as_in_keras() -> None:
    opt = wrap(optimizer(keras))
    opt.apply([], [])
    assert not opt.built
    assert int(opt.applied_steps) == 0


def test_minimizing_a_tensor_without_its_tape_is_refused() -> None:
    with pytest.raises(ValueError, match="the loss is a tensor: pass the tape"):
        wrap(optimizer(keras)).minimize(tf.constant(1.0), kernel_and_bias(keras))


def test_config_keeps_jit_compile() -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), jit_compile=False)
    assert opt.get_config()["jit_compile"] is False
    assert type(opt).from_config(opt.get_config()).get_config() == opt.get_config()
    assert wrap(optimizer(keras)).get_config()["jit_compile"] == "auto"


def test_fewer_gradients_than_variables_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 gradients for 2 variables: pass one for each"):
        wrap(optimizer(keras)).apply(gradients(0)[:1], kernel_and_bias(keras))


def test_float64_gradient_that_overflows_its_float32_variable_skips_the_step() -> None:
    (weight,) = variables = [variable(keras, [1, 2])]
    opt = wrap(optimizer(keras))
    opt.apply([tf.constant([1e45, 0], tf.float64)], variables)
    assert (weight.numpy().tolist(), int(opt.skipped_steps)) == ([1, 2], 1)


@pytest.mark.parametrize(
    ("make_manager", "detector"),
    [
        (lambda: tfmp.FixedLossScaleManager(1024), tfmp.SaturationDetector(dtype="float8_e4m3fn")),
        (lambda: tfmp.LogMaxLossScaleManager(init_loss_scale=1024), tfmp.NonFiniteDetector()),
    ],
    ids=["saturation", "log max"],
)
def test_gradient_that_overwrites_its_variable_is_checked_only_for_finiteness(
    make_manager: Any, detector: tfmp.OverflowDetector
) -> None:
    variables = [variable(keras, [1, 2]), variable(keras, 1.0)]
    variables[1].overwrite_with_gradient = True
    opt = tfmp.LossScaleOptimizer(optimizer(keras), make_manager(), overflow_detector=detector)
    opt.apply([tf.constant([0.0, 256.0]), tf.constant(2.0**20)], variables)
    assert ([each.numpy().tolist() for each in variables], int(opt.skipped_steps)) == ([[1, 1.875], 2.0**20], 0)
    # The largest gradient is 0.25, and 65504 / 0.25 is between 2**17 and 2**18.
    assert float(opt.loss_scale) == (2.0**17 if opt._loss_scale_manager.needs_max_abs else 1024)
    opt.apply([tf.zeros([2]), tf.constant(math.nan)], variables)
    assert int(opt.skipped_steps) == 1
    (report,) = opt.overflow_reports()
    assert report.last.numpy().tolist() == [[0, 0, 0], [0, 1, 0]]


def test_custom_detector_gets_unscaled_gradients() -> None:
    seen = []

    class Detector(tfmp.OverflowDetector):
        def all_finite(self, grads: Any, loss_scale: tf.Tensor) -> tf.Tensor:
            seen.append(([grad.numpy().tolist() for grad in grads], float(loss_scale)))
            return tf.constant(True)

    variables = [variable(keras, [1, 2])]
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), overflow_detector=Detector())
    opt.apply([tf.constant([8.0, 16.0])], variables)
    assert seen == [([[1, 2]], 8)]


def test_stateless_apply_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="not for the TensorFlow backend"):
        wrap(optimizer(keras)).stateless_apply([], [], [])


# The name of the backend is patched, because no other backend is installed; even NumPy's needs JAX.
def test_other_backend_than_tensorflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="TensorFlow backend of Keras, got 'jax': set KERAS_BACKEND=tensorflow"):
        wrap(optimizer(keras))


def test_every_public_name_of_keras_own_wrapper_is_overridden_refused_or_inherited() -> None:
    overridden = {"apply", "build", "exclude_from_weight_decay", "from_config", "get_config", "scale_loss"}
    overridden |= {
        "apply_gradients",
        "finalize_variable_values",
        "iterations",
        "load_own_variables",
        "save_own_variables",
        "set_weights",
    }
    refused = {"stateless_apply"}
    # These work on the inner optimizer or on `variables`, so the methods of Keras' own wrapper are correct here.
    inherited = {
        *("learning_rate", "variables"),
        "check_finite",
        *("add_optimizer_variables", "add_variable", "add_variable_from_reference"),
        *("assign", "assign_add", "assign_sub", "update_step"),
    }
    parent = keras.optimizers.LossScaleOptimizer
    present = {name for name in dir(parent) if not name.startswith("_")}
    # Keras before 3.10 does not have add_optimizer_variables.
    assert present | {"add_optimizer_variables"} == overridden | refused | inherited
    front_end = type(wrap(optimizer(keras)))
    for name in overridden | refused:
        assert getattr(front_end, name) is not getattr(parent, name), name
    for name in inherited & present:
        assert getattr(front_end, name) is getattr(parent, name), name


def test_scale_and_counter_are_read_and_set_as_in_keras_own_wrapper() -> None:
    of_keras = keras.optimizers.LossScaleOptimizer(optimizer(keras), initial_scale=8, dynamic_growth_steps=3)
    ours = tfmp.LossScaleOptimizer(optimizer(keras), initial_scale=8, dynamic_growth_steps=3)
    found = []
    for opt in (of_keras, ours):
        seen, variables = [], kernel_and_bias(keras)
        opt.build(variables)
        for step, last in enumerate([None, None, None, math.inf, None]):
            if step == 2:
                opt.dynamic_scale.assign(64)
            opt.scale_loss(tf.constant(0.0))
            opt.apply(gradients(0, last), variables)
            seen.append([float(opt.dynamic_scale), int(opt.step_counter), float(opt.dynamic_scale.numpy())])
        found.append(seen)
    assert found[0] == found[1] == [[8, 1, 8], [8, 2, 8], [128, 0, 128], [64, 0, 64], [64, 1, 64]]
    ours.dynamic_scale = 32
    assert [float(each) for each in (ours.dynamic_scale, ours.loss_scale, ours.manager.get_loss_scale())] == [32] * 3


@pytest.mark.parametrize(
    ("manager", "counts"), [(tfmp.FixedLossScaleManager, False), (tfmp.LogMaxLossScaleManager, True)]
)
def test_scale_that_a_manager_does_not_let_one_set_is_readable(manager: Any, counts: bool) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), manager(**{} if counts else {"loss_scale": 2**15}))
    assert float(opt.dynamic_scale) == 2**15
    with pytest.raises(NotImplementedError, match=r"cannot be set: use a tfmp\.ExponentialUpdateLossScaleManager"):
        opt.dynamic_scale = 8.0
    assert float(opt.loss_scale) == 2**15
    if counts:
        assert int(opt.step_counter) == 0
    else:
        with pytest.raises(AttributeError, match="a FixedLossScaleManager does not count the finite steps"):
            _ = opt.step_counter


def test_scale_is_read_and_set_within_a_function(tmp_path: Any) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), initial_scale=8)

    @tf.function
    def doubled() -> tf.Tensor:
        opt.dynamic_scale.assign(2 * opt.dynamic_scale)
        return opt.dynamic_scale + 0.0

    assert [float(doubled()) for _ in range(3)] == [16, 32, 64]
    assert float(opt.loss_scale) == 64
    # The names are in no checkpoint: there, that of Keras' own wrapper has another meaning.
    path = tf.train.Checkpoint(opt=opt).save(tmp_path / "checkpoint")
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not any("dynamic_scale" in name or "step_counter" in name for name in names)
