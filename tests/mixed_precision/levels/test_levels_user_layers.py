"""Levels of models whose layers have attributes with names of Keras, hold layers that are not called, or refuse."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import CASES, policies, policy, values

import tfmp
from tfmp.hosts.keras.which import is_keras2

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

_X, _Y = CASES["sequential"].batch, np.ones([4, 2], np.float32)


def _is_mixed(model: Any) -> bool:
    return {name for _, name, _, _ in policies(model)} == {"mixed_float16"}


def _with_attributes(keras: ModuleType, base: str, attributes: dict[str, Any]) -> Any:
    """Return a layer or a model with attributes of these names, as far as Keras leaves them to the user."""

    class Own(getattr(keras, base) if base == "Model" else keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)
            for name, value in attributes.items():
                try:
                    setattr(self, name, value)
                except (AttributeError, ValueError, TypeError):
                    continue

        def call(self, x: Any) -> Any:
            return self.dense(x)

    return Own()


class _Anything:
    def __repr__(self) -> str:
        return "anything"


_OBJECT = _Anything()
_NAMES = ("activation", "cell", "cells", "compiled", "distribute_strategy", "inputs", "interpolation", "layer")
_NAMES += ("layers", "operations", "optimizer", "outputs", "quantization_mode", "_functional")


@pytest.mark.parametrize("value", [3, "int8", {"ids": 1}, [_OBJECT], (None, 2.5), np.ones(2)], ids=str)
@pytest.mark.parametrize("base", ["Layer", "Model"])
@for_every_keras()
def test_attribute_with_a_name_of_keras_means_nothing_in_a_layer_of_the_users(
    keras: ModuleType, base: str, value: Any
) -> None:
    # Keras itself reads these of models.
    names = [name for name in _NAMES if base == "Layer" or name not in ("compiled", "inputs", "optimizer", "outputs")]
    own = _with_attributes(keras, base, dict.fromkeys(names, value))
    model = keras.Sequential([keras.Input([3]), own, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert tfmp.check_precision(model, None, [(_X, _Y)], progress=False).float16_error is None
    with pytest.warns(UserWarning, match="does not scale the loss"):
        tfmp.set_precision(model, "O2")
    assert _is_mixed(model)
    tfmp.set_precision(own, "O1-bfloat16")
    assert policy(own.dense) == "mixed_bfloat16"


@for_every_keras()
def test_inputs_of_a_layer_of_the_users_may_be_tensors_by_name(keras: ModuleType) -> None:
    class Encoder(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = keras.layers.Embedding(8, 4)
            self.inputs = {"ids": keras.Input([3], dtype="float16")}

        def call(self, x: Any) -> Any:
            return tf.reduce_mean(self.embed(x["ids"]), 1)

    class Net(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Encoder(), keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.head(self.encoder(x))

    model = Net()
    model({"ids": np.ones([2, 3], np.int32)})
    tfmp.set_precision(model, "O2")
    assert _is_mixed(model)
    assert model.encoder.inputs["ids"].dtype == "float16"


@for_every_keras()
def test_activation_that_cannot_be_read_yet_is_none(keras: ModuleType) -> None:
    class Own(keras.layers.Layer):  # type: ignore[name-defined]
        @property
        def activation(self) -> Any:
            raise RuntimeError("not built")

    layer = Own()
    tfmp.set_precision(layer, "O1")
    assert policy(layer) == "mixed_float16"


@for_every_keras("keras2", "tf_keras")
def test_types_that_a_class_of_the_users_names_so_are_not_those_of_keras(keras: ModuleType) -> None:
    class Own(keras.layers.Dense):  # type: ignore[name-defined]
        compute_dtype = "none of your business"
        variable_dtype = None

    model = keras.Sequential([keras.Input([3]), Own(2)])
    report = tfmp.set_precision(model, "O2")
    assert [layer.now for layer in report.layers] == ["mixed_float16"] * 2
    assert model(_X).dtype == tf.float16


def _task(keras: ModuleType, preprocessor: Any, call: Callable[..., Any] | None = None) -> Any:
    """Return a functional model of a class of its own that holds a preprocessor which its graph does not call."""

    class Task(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            inputs = keras.Input([3])
            body = keras.Sequential([keras.Input([3]), keras.layers.Dense(3, name="inner")], name="body")
            super().__init__(inputs, keras.layers.Dense(2, name="head")(body(inputs)))
            self.body, self.preprocessor = body, preprocessor

    if call is not None:
        Task.call = call
    return Task()


def _preprocessor(keras: ModuleType) -> Any:
    class Preprocessor(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(name="preprocessor")
            self.tokenizer = keras.layers.Layer(dtype="int32", name="tokenizer")
            self.scale = keras.layers.Rescaling(0.5, name="scale")

        def call(self, x: Any) -> Any:
            return self.scale(x)

    return Preprocessor()


@for_every_keras()
def test_layers_that_the_graph_does_not_call_are_left_alone(keras: ModuleType) -> None:
    shared = _preprocessor(keras)
    model, other = _task(keras, shared), _task(keras, shared)
    report = tfmp.set_precision(model, "O2", keep_float32=["head"])
    assert {layer.name.rpartition("/")[2]: (layer.now, layer.reason) for layer in report.layers if layer.reason} == {
        "head": ("float32", "in keep_float32"),
        "preprocessor": ("float32", "not called by the graph of the model that holds it"),
        "scale": ("float32", "not called by the graph of the model that holds it"),
        "tokenizer": ("int32", "computes in int32"),
    }
    assert (policy(model.body), policy(shared), policy(shared.scale)) == ("mixed_float16", "float32", "float32")
    # What another model calls in float16 is no reason to warn of this one.
    tfmp.set_precision(shared, "O2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.compile("sgd", "mse")


@for_every_keras()
def test_model_with_a_preprocessor_of_integers_is_checked(keras: ModuleType) -> None:
    model = _task(keras, _preprocessor(keras))
    report = tfmp.check_precision(model, "mse", [(_X, _Y)], progress=False)
    assert [layer.name for layer in report.layers] == ["inner", "head"]
    assert report.float16_error is None


@for_every_keras()
def test_layers_that_a_call_of_the_users_may_reach_get_the_level(keras: ModuleType) -> None:
    def call(self: Any, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        return self.preprocessor(x)

    shared = _preprocessor(keras)
    tfmp.set_precision(_task(keras, shared, call), "O2")
    assert (policy(shared), policy(shared.tokenizer)) == ("mixed_float16", "int32")


@for_every_keras()
def test_layer_that_is_not_called_is_kept_if_it_is_named(keras: ModuleType) -> None:
    shared = _preprocessor(keras)
    tfmp.set_precision(shared, "O2")
    tfmp.set_precision(_task(keras, shared), "O2", keep_float32=["preprocessor"])
    assert policy(shared.scale) == "float32"


def _trained(keras: ModuleType, last: Any) -> Any:
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), last(2, name="last")]
    model = keras.Sequential([keras.Input([3]), *layers])
    model.compile("sgd", "mse")
    model.fit(_X, _Y, verbose=0)
    return model


def _state(model: Any) -> Any:
    # Keras 2 makes a property of its own anew with the policy.
    variables = [{name: id(v) for name, v in vars(layer).items() if "dtype" not in name} for layer in model.layers]
    traced = [getattr(model, f"{each}_function") for each in ("train", "test", "predict")]
    return policies(model), values(model), variables, traced, model.inputs[0].dtype, model(_X).numpy().tolist()


@for_every_keras()
def test_model_is_as_before_if_a_layer_refuses_its_policy(keras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(keras.layers.Dense):  # type: ignore[name-defined]
        pass

    def refuse(*_: Any) -> None:
        raise RuntimeError("injected")

    model = _trained(keras, Last)
    before = _state(model)
    with monkeypatch.context() as patch:
        if is_keras2(keras):
            own = Last._set_dtype_policy
            refusing = lambda self, new: refuse() if new.name != "float32" else own(self, new)  # noqa: E731
            patch.setattr(Last, "_set_dtype_policy", refusing)
        else:
            patch.setattr(Last, "dtype_policy", property(Last.dtype_policy.fget, refuse))
        with pytest.raises(RuntimeError, match="injected"):
            tfmp.set_precision(model, "O2")
    assert _state(model) == before


@for_every_keras()
def test_model_is_as_before_if_the_warning_is_an_error(keras: ModuleType) -> None:
    model = _trained(keras, keras.layers.Dense)
    before = _state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="does not scale the loss"):
            tfmp.set_precision(model, "O2")
    assert _state(model) == before


@for_every_keras("keras3")
def test_map_of_policies_is_as_before_if_the_warning_is_an_error(keras: ModuleType) -> None:
    if not hasattr(keras.dtype_policies, "DTypePolicyMap"):
        pytest.skip("needs maps of policies")
    found = keras.dtype_policies.DTypePolicyMap(default_policy=keras.dtype_policies.DTypePolicy("float32"))
    layers = [keras.layers.Dense(2, dtype=found, name=name) for name in ("one", "two")]
    model = keras.Sequential([keras.Input([3]), *layers])
    model.compile("sgd", "mse")
    before = dict(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="does not scale the loss"):
            tfmp.set_precision(model, "O2")
    assert (dict(found), {layer.compute_dtype for layer in layers}) == (before, {"float32"})
