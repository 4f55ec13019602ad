"""What tfmp.Recompute refuses, by name and with its reason; and what it shows of itself."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_models import WAYS, data, dense, fitted, is_keras3
from kerases import for_every_keras

import tfmp


@for_every_keras()
def test_wrapper_is_a_layer_of_the_same_keras_and_has_the_name_of_the_layer(keras: ModuleType) -> None:
    wrapped = tfmp.Recompute(keras.layers.Dense(2, name="dense"))
    assert isinstance(wrapped, keras.layers.Layer)
    assert isinstance(wrapped, tfmp.Recompute)
    assert wrapped.name == wrapped.layer.name == "dense"
    assert tfmp.Recompute(layer=keras.layers.Dense(2), name="other").name == "other"
    assert list(inspect.signature(tfmp.Recompute).parameters) == ["layer", "name", "trainable"]


class _Mine(tfmp.Recompute):
    pass


_NO_LAYER = "layer must be a layer or model of Keras, got .*tfmp.recompute takes functions"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *((lambda _, layer=layer: tfmp.Recompute(layer), TypeError, _NO_LAYER) for layer in (None, "dense", [1])),
        (lambda keras: tfmp.Recompute(keras.activations.relu), TypeError, _NO_LAYER),
        (
            lambda keras: tfmp.Recompute(tfmp.Recompute(keras.layers.Dense(2, name="dense"))),
            ValueError,
            "the layer 'dense' is a tfmp.Recompute already: wrap it once",
        ),
        (
            lambda keras: _Mine(keras.layers.Dense(2)),
            TypeError,
            "_Mine subclasses tfmp.Recompute, which only picks a class: wrap a layer instead",
        ),
    ],
)
@for_every_keras()
def test_what_is_no_layer_to_wrap_is_refused(
    keras: ModuleType, make: Callable[[ModuleType], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(keras)


@for_every_keras("keras2", "tf_keras")
def test_dynamic_layer_is_refused(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match="'slow' is dynamic"):
        tfmp.Recompute(keras.layers.Layer(dynamic=True, name="slow"))


def _noise(keras: ModuleType) -> Any:
    class Noise(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: Any) -> Any:
            return x + tf.random.normal(tf.shape(x))

    return Noise(name="block")


def _counter(keras: ModuleType) -> Any:
    class Counter(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.calls = tf.Variable(0.0, name="calls")

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            return x

    return Counter(name="block")


def _normalizing_its_weight(keras: ModuleType) -> Any:
    return keras.layers.SpectralNormalization(keras.layers.Dense(8, name="dense"), name="block")


def _legacy_dropout(keras: ModuleType) -> Any:
    drop = keras.layers.Dropout(0.5, rng_type="legacy_stateful", name="my_dropout")
    return keras.Sequential([dense(keras, 8), drop], name="block")


def _assert_refused_in_training(keras: ModuleType, make: Callable[[ModuleType], Any], way: str, message: str) -> None:
    net = keras.Sequential([keras.Input([8]), tfmp.Recompute(make(keras)), dense(keras, 1)])
    with pytest.raises(ValueError, match=rf"the layer 'block'.* cannot be recomputed: {message}"):
        fitted(net, **WAYS[way])
    if make is not _noise and make is not _counter:
        # Without gradients it may do so.
        assert net.predict(data()[0], verbose=0).shape == (24, 1)
        assert np.isfinite(net.evaluate(*data(), verbose=0))


@pytest.mark.parametrize("way", ["graph", "eager"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_noise, "its op .*draws other random numbers the second time"),
        (_counter, "its op .*changes a variable, which would happen twice"),
        (_normalizing_its_weight, "its call assigns .*dense/kernel"),
    ],
)
@for_every_keras("keras3")
def test_state_that_is_in_no_variable_of_keras3_or_in_a_trained_one_is_refused(
    keras: ModuleType, make: Any, message: str, way: str
) -> None:
    _assert_refused_in_training(keras, make, way, message)


@pytest.mark.parametrize("way", WAYS)
@for_every_keras("keras2", "tf_keras")
def test_random_ops_of_keras2_that_keep_their_own_state_are_refused_in_training(keras: ModuleType, way: str) -> None:
    assert not is_keras3(keras)
    _assert_refused_in_training(keras, _legacy_dropout, way, "its op .*my_dropout.*enable_tf_random_generator")
