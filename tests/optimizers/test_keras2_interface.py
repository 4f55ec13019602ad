"""What Keras 2 documents of its own wrapper, tested with that wrapper and with tfmp's in its place."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import h5py
import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, kernel_and_bias, linear_model, optimizer

import tfmp

_Wrapper: TypeAlias = Callable[..., Any]


@pytest.fixture(params=["own", "tfmp"])
def wrapper(request: pytest.FixtureRequest, keras: ModuleType) -> _Wrapper:
    wrappers: dict[str, _Wrapper] = {"own": keras.mixed_precision.LossScaleOptimizer, "tfmp": tfmp.LossScaleOptimizer}
    return wrappers[request.param]


for_every_keras2 = for_every_keras("keras2", "tf_keras")


@for_every_keras2
def test_settings_can_be_read(keras: ModuleType, wrapper: _Wrapper) -> None:
    opt = wrapper(optimizer(keras))
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps, float(opt.loss_scale)) == (
        True,
        2**15,
        2000,
        2**15,
    )
    opt = wrapper(optimizer(keras), initial_scale=64, dynamic_growth_steps=3)
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps, float(opt.loss_scale)) == (True, 64, 3, 64)
    opt = wrapper(optimizer(keras), dynamic=False, initial_scale=8)
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps, float(opt.loss_scale)) == (False, 8, None, 8)


@for_every_keras2
def test_losses_and_functions_that_return_them_are_scaled(keras: ModuleType, wrapper: _Wrapper) -> None:
    opt = wrapper(optimizer(keras), initial_scale=8)
    assert float(opt.get_scaled_loss(tf.constant(3.0))) == 24
    assert float(opt.get_scaled_loss(lambda: tf.constant(3.0))()) == 24


@for_every_keras2
def test_gradients_are_unscaled_also_where_sparse_or_missing(keras: ModuleType, wrapper: _Wrapper) -> None:
    opt = wrapper(optimizer(keras), initial_scale=8)
    opt.get_scaled_loss(tf.constant(1.0))
    sparse = tf.IndexedSlices(tf.constant([[16.0]]), tf.constant([1]), tf.constant([2, 1]))
    dense, missing, rows = opt.get_unscaled_gradients([tf.constant([8.0, 4.0]), None, sparse])
    assert (dense.numpy().tolist(), missing, rows.values.numpy().tolist()) == ([1, 0.5], None, [[2]])


@pytest.mark.parametrize("compiled", [False, True])
@for_every_keras2
def test_scale_falls_at_an_overflow_and_rises_after_finite_steps(
    keras: ModuleType, wrapper: _Wrapper, compiled: bool
) -> None:
    opt, weight = wrapper(optimizer(keras), initial_scale=8, dynamic_growth_steps=2), tf.Variable(1.0)
    opt.build([weight])

    def step(value: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scaled = opt.get_scaled_loss(weight * value)
        opt.apply_gradients(zip(opt.get_unscaled_gradients(tape.gradient(scaled, [weight])), [weight], strict=True))

    run = tf.function(step) if compiled else step
    seen = []
    for value in (1.0, math.inf, 1.0, 1.0, math.nan):
        run(tf.constant(value))
        seen.append((float(weight), float(opt.loss_scale)))
    assert seen == [(0.5, 8), (0.5, 4), (0, 4), (-0.5, 8), (-0.5, 4)]


@for_every_keras2
def test_minimize_takes_functions_and_tapes(keras: ModuleType, wrapper: _Wrapper) -> None:
    opt, weight = wrapper(optimizer(keras), initial_scale=8), tf.Variable(1.0)
    opt.minimize(lambda: weight * 2.0, [weight])
    with tf.GradientTape() as tape:
        loss = weight * 2.0
    opt.minimize(loss, [weight], tape=tape)
    assert (float(weight), int(opt.iterations)) == (-1, 2)


@for_every_keras2
def test_attributes_of_the_inner_optimizer_can_be_read_and_set(keras: ModuleType, wrapper: _Wrapper) -> None:
    inner = optimizer(keras)
    opt = wrapper(inner, initial_scale=8)
    assert opt.inner_optimizer is inner
    opt.learning_rate = 0.25
    assert (float(inner.learning_rate), float(opt.lr)) == (0.25, 0.25)
    opt.lr = 0.125
    assert float(inner.learning_rate) == 0.125
    opt.build(kernel_and_bias(keras))
    assert {id(each) for each in inner.variables} <= {id(each) for each in opt.variables}
    # Not all of the inner optimizer's attributes are those of the wrapper.
    with pytest.raises(AttributeError):
        _ = opt.momentum


@for_every_keras2
def test_configuration_makes_the_same_optimizer(keras: ModuleType, wrapper: _Wrapper) -> None:
    opt = wrapper(optimizer(keras, learning_rate=0.25), initial_scale=64, dynamic_growth_steps=3)
    again = type(opt).from_config(opt.get_config())
    assert (again.initial_scale, again.dynamic_growth_steps, float(again.inner_optimizer.learning_rate)) == (
        64,
        3,
        0.25,
    )
    serialized = keras.optimizers.serialize(opt)
    assert float(keras.optimizers.deserialize(serialized).loss_scale) == 64


@for_every_keras2
def test_what_is_no_optimizer_or_wrapped_already_is_refused(keras: ModuleType, wrapper: _Wrapper) -> None:
    for wrong in ("sgd", keras.optimizers.schedules.PolynomialDecay(0.5, 10)):
        with pytest.raises(TypeError, match=r"must be"):
            wrapper(wrong)
    with pytest.raises((TypeError, ValueError), match=r"LossScaleOptimizer"):
        wrapper(wrapper(optimizer(keras)))


@for_every_keras2
def test_settings_that_contradict_each_other_are_refused(keras: ModuleType, wrapper: _Wrapper) -> None:
    with pytest.raises(ValueError, match=r"initial_scale"):
        wrapper(optimizer(keras), dynamic=False)
    with pytest.raises(ValueError, match=r"dynamic_growth_steps"):
        wrapper(optimizer(keras), dynamic=False, initial_scale=8, dynamic_growth_steps=2)
    with pytest.raises((TypeError, ValueError), match=r"dynamic|foo"):
        wrapper(optimizer(keras), foo=True)


@for_every_keras2
def test_fit_uses_the_wrapper_as_it_is(keras: ModuleType, wrapper: _Wrapper) -> None:
    opt = wrapper(optimizer(keras), initial_scale=8)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = linear_model(keras, opt)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.fit(np.ones([4, 1]), np.ones([4, 1]), batch_size=1, verbose=0)
    assert model.optimizer is opt
    assert model.get_weights()[0].item() == -2


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@for_every_keras2
def test_wrapped_optimizer_has_the_private_name_that_public_code_reads(
    keras: ModuleType, wrapper: _Wrapper, legacy: bool
) -> None:
    inner = (keras.optimizers.legacy if legacy else keras.optimizers).SGD(0.5)
    opt = wrapper(inner)
    assert opt._optimizer is inner
    assert opt._optimizer is opt.inner_optimizer


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@for_every_keras2
def test_private_name_of_the_wrapped_optimizer_is_in_no_file(keras: ModuleType, legacy: bool, tmp_path: Path) -> None:
    inner = (keras.optimizers.legacy if legacy else keras.optimizers).SGD(0.5)
    model = linear_model(keras, tfmp.LossScaleOptimizer(inner, initial_scale=8))
    model.fit(np.ones([4, 1]), np.ones([4, 1]), verbose=0)
    path = tf.train.Checkpoint(opt=model.optimizer).save(tmp_path / "checkpoint")
    names = {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE") for name, _ in tf.train.list_variables(path)}
    if legacy:
        of_inner = ["iter", "learning_rate", "decay", "momentum"]
        of_wrapper = ["loss_scale/current_loss_scale", "loss_scale/good_steps"]
        of_wrapper += [f"loss_scale_manager/state/values/{name}" for name in ("loss_scale", "good_steps", "bad_steps")]
    else:
        of_inner = ["_iterations", "_learning_rate", "_variables/1"]
        of_wrapper = [f"_variables/state_{index}" for index in range(8)]
    assert names - {"_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter"} == {f"opt/{key}" for key in of_inner + of_wrapper}
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        groups = [] if legacy else ["_loss_scale_state", "inner_optimizer", "vars"]
        assert sorted(file.get("optimizer", ())) == groups
    with pytest.raises(AttributeError, match="setter"):
        model.optimizer._optimizer = optimizer(keras)
