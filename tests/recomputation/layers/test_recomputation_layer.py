"""The front door Recompute: which class it makes, and what it refuses."""

import inspect

import keras
import pytest
import tensorflow as tf

import tfmp


def test_wrapper_is_a_layer_of_the_same_keras_and_has_the_name_of_the_layer() -> None:
    wrapped = tfmp.Recompute(keras.layers.Dense(2, name="dense"))
    assert isinstance(wrapped, keras.layers.Layer)
    assert isinstance(wrapped, tfmp.Recompute)
    assert wrapped.name == wrapped.layer.name == "dense"
    assert tfmp.Recompute(layer=keras.layers.Dense(2), name="other").name == "other"


@pytest.mark.parametrize("layer", [None, tf.identity, "dense", [1]])
def test_what_is_no_layer_is_refused(layer: object) -> None:
    with pytest.raises(
        TypeError, match=r"layer must be a layer or model of Keras, got .*tfmp.recompute takes functions"
    ):
        tfmp.Recompute(layer)


def test_wrapper_around_a_wrapper_is_refused() -> None:
    wrapped = tfmp.Recompute(keras.layers.Dense(2, name="dense"))
    with pytest.raises(ValueError, match=r"the layer 'dense' is a tfmp.Recompute already: wrap it once"):
        tfmp.Recompute(wrapped)


def test_subclass_of_the_front_door_is_refused() -> None:
    class Mine(tfmp.Recompute):
        pass

    with pytest.raises(
        TypeError, match=r"Mine subclasses tfmp.Recompute, which only picks a class: wrap a layer instead"
    ):
        Mine(keras.layers.Dense(2))


def test_signature_shows_the_arguments() -> None:
    assert list(inspect.signature(tfmp.Recompute).parameters) == ["layer", "name", "trainable"]
