"""check_precision leaves models of every Keras, and the random generators, as they were."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import called, check, composed, data, overflowing_within, state, stateful_model
from kerases import for_every_keras, skip_before

import tfmp


def _trained(keras: ModuleType, policy: str = "float32", opt: Any = None) -> Any:
    model = stateful_model(keras, policy)
    model.compile(opt or keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=True)
    return _fit(model)


def _fit(model: Any) -> Any:
    # In Keras 2, Dropout has no state of its own.
    tf.random.set_seed(2)
    model.fit(*data(), batch_size=4, shuffle=False, verbose=0)
    return model


def _in_float16(keras: ModuleType) -> Any:
    return _trained(keras, "mixed_float16")


def _with_scaled_loss(keras: ModuleType) -> Any:
    sgd, manager = keras.optimizers.SGD(0.01), tfmp.FixedLossScaleManager(1024)
    return _trained(keras, opt=tfmp.LossScaleOptimizer(sgd, manager))


def _with_layers_that_are_kept(keras: ModuleType) -> Any:
    layers = [keras.layers.Dense(4), overflowing_within(keras, "inside"), keras.layers.Dense(1)]
    model = called(keras.Sequential([keras.Input([4]), *layers]))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    # Keras 2 makes its metrics when the compiled loss is used first.
    model.evaluate(*data(), verbose=0)
    return model


@pytest.mark.parametrize("make", [_trained, _in_float16, _with_scaled_loss, _with_layers_that_are_kept])
@for_every_keras()
def test_model_is_as_before_and_a_second_check_finds_the_same(
    keras: ModuleType, make: Callable[[ModuleType], Any]
) -> None:
    model, batches = make(keras), [data(1), data(2)]
    before = state(model)
    reports = [check(model, loss_fn, batches) for loss_fn in (None, None, "mse")]
    assert state(model) == before
    assert reports[0].to_json() == reports[1].to_json()
    assert (reports[0].batches, reports[0].loss) == (2, reports[2].loss)
    assert reports[0].keep_float32 == (["inside"] if make is _with_layers_that_are_kept else [])


@for_every_keras()
def test_training_goes_on_as_without_a_check(keras: ModuleType) -> None:
    model, twin = _trained(keras), _trained(keras)
    check(model, None, [data(1)])
    for one, other in zip(_fit(model).get_weights(), _fit(twin).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class _Interrupted(Exception):  # noqa: N818 - not an error of the check
    pass


@for_every_keras()
def test_error_of_the_loss_leaves_the_model_as_before(keras: ModuleType) -> None:
    model, calls = _trained(keras), list[str]()
    before, expected = state(model), check(model, "mse", [data(1)]).to_json()

    def loss(labels: Any, outputs: Any) -> Any:
        calls.append(outputs.dtype.name)
        if len(calls) == last:
            raise _Interrupted
        return (tf.cast(outputs, tf.float32) - labels) ** 2

    # The calls are those in float32, in float32 for the comparison, and in float16.
    for last in (1, 2, 3):
        calls.clear()
        with pytest.raises(_Interrupted):
            check(model, loss, [data(1)])
        assert calls == ["float32", "float32", "float16"][:last]
        assert state(model) == before
    assert check(model, "mse", [data(1)]).to_json() == expected


@for_every_keras()
def test_error_of_a_layer_leaves_the_model_as_before(keras: ModuleType) -> None:
    def refusing(self: Any, x: tf.Tensor) -> tf.Tensor:
        if x.dtype == tf.float16:
            raise _Interrupted
        return x

    layers = [keras.layers.Dense(4), composed(keras, refusing), keras.layers.Dense(1)]
    model = called(keras.Sequential([keras.Input([4]), *layers]))
    before = state(model)
    with pytest.raises(_Interrupted):
        check(model, "mse", [data()])
    assert state(model) == before


def _random_numbers(keras: ModuleType) -> list[Any]:
    ours = [keras.random.normal([2])] if keras.__version__.startswith("3.") else []
    tensors = [*ours, tf.random.normal([2]), tf.random.uniform([2]), tf.random.get_global_generator().normal([2])]
    return [random.random(), float(np.random.rand()), *(tensor.numpy().tolist() for tensor in tensors)]


@for_every_keras()
def test_next_random_numbers_are_those_without_a_check(keras: ModuleType) -> None:
    skip_before((3, 13), keras, "its global generator takes no seed")
    model = stateful_model(keras)

    def numbers(between: Callable[[], object]) -> list[Any]:
        keras.utils.set_random_seed(7)
        tf.random.set_global_generator(tf.random.Generator.from_seed(7))
        first = _random_numbers(keras)
        between()
        return [*first, *_random_numbers(keras)]

    expected = numbers(lambda: None)
    assert numbers(lambda: check(model, "mse", [data()])) == expected

    def interrupted() -> None:
        def loss(labels: Any, outputs: Any) -> Any:
            raise _Interrupted

        with pytest.raises(_Interrupted):
            check(model, loss, [data()])

    assert numbers(interrupted) == expected


@for_every_keras()
def test_model_of_two_replicas_is_checked_and_as_before(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        model = stateful_model(keras)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    twin = stateful_model(keras)
    twin.set_weights(model.get_weights())
    # Keras 2 makes its metrics when the compiled loss is used first.
    model.evaluate(*data(1), verbose=0)
    before = state(model)
    report, expected = check(model, "mse", [data(1)]), check(twin, "mse", [data(1)])
    assert state(model) == before
    assert check(model, None, [data(1)]).loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.suggested_loss_scale == expected.suggested_loss_scale
    for layer in expected.layers:
        assert report[layer.name].activations == layer.activations
        assert report[layer.name].weight_gradients.exponents == layer.weight_gradients.exponents
