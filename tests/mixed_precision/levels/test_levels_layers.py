"""Levels of layers of users that have attributes of Keras, are not called, or refuse; and of layers of Keras itself."""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, installed
from levelled_models import CASES, outputs, policies, policy, values

import tfmp
from tfmp.any_keras.which import is_keras2

# What Keras itself warns of, under some versions of Python and NumPy.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:keras")

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


_NAMES = ("activation", "cell", "cells", "compiled", "distribute_strategy", "inputs", "interpolation", "layer")
_NAMES += ("layers", "operations", "optimizer", "outputs", "quantization_mode", "_functional")


@pytest.mark.parametrize(
    "value", [3, "int8", {"ids": 1}, "tensors by name", [object], (None, 2.5), np.ones(2)], ids=str
)
@pytest.mark.parametrize("base", ["Layer", "Model"])
@for_every_keras()
def test_attribute_with_a_name_of_keras_means_nothing_in_a_layer_of_the_users(
    keras: ModuleType, base: str, value: Any
) -> None:
    by_name = isinstance(value, str) and value == "tensors by name"
    value = {"ids": keras.Input([3], dtype="float16")} if by_name else value
    # Keras itself reads these of models.
    names = [name for name in _NAMES if base == "Layer" or name not in ("compiled", "inputs", "optimizer", "outputs")]
    own = _with_attributes(keras, base, dict.fromkeys(names, value))
    model = keras.Sequential([keras.Input([3]), own, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert tfmp.check_precision(model, None, [(_X, _Y)], progress=False).float16_error is None
    with pytest.warns(UserWarning, match="does not scale the loss"):
        tfmp.set_precision(model, "O2")
    assert _is_mixed(model)
    assert not by_name or base == "Model" or own.inputs["ids"].dtype == "float16"
    tfmp.set_precision(own, "O1-bfloat16")
    assert policy(own.dense) == "mixed_bfloat16"


@for_every_keras()
def test_attributes_that_cannot_be_read_or_are_no_types_mean_nothing(keras: ModuleType) -> None:
    class Own(keras.layers.Dense):  # type: ignore[name-defined]
        if is_keras2(keras):
            compute_dtype = "none of your business"
            variable_dtype = None

    class Unreadable(keras.layers.Layer):  # type: ignore[name-defined]
        @property
        def activation(self) -> Any:
            raise RuntimeError("not built")

        def call(self, x: Any) -> Any:
            return x

    model = keras.Sequential([keras.Input([3]), Own(2), Unreadable()])
    report = tfmp.set_precision(model, "O1")
    assert [layer.now for layer in report.layers] == ["mixed_float16"] * 3
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
    checked = tfmp.check_precision(_task(keras, _preprocessor(keras)), "mse", [(_X, _Y)], progress=False)
    assert ([layer.name for layer in checked.layers], checked.float16_error) == (["inner", "head"], None)
    # What another model calls in float16 is no reason to warn of this one.
    tfmp.set_precision(shared, "O2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.compile("sgd", "mse")


@for_every_keras()
def test_layers_that_a_call_of_the_users_may_reach_get_the_level(keras: ModuleType) -> None:
    def call(self: Any, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        return self.preprocessor(x)

    shared = _preprocessor(keras)
    tfmp.set_precision(_task(keras, shared, call), "O2")
    assert (policy(shared), policy(shared.tokenizer)) == ("mixed_float16", "int32")
    # A layer that is not called is kept if it is named.
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


@pytest.mark.parametrize("why", ["a layer refuses", "the warning is an error", "the same with a map of policies"])
@for_every_keras()
def test_model_is_as_before_if_its_level_cannot_be_set(
    keras: ModuleType, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Last(keras.layers.Dense):  # type: ignore[name-defined]
        pass

    def refuse(*_: Any) -> None:
        raise RuntimeError("injected")

    found = None
    if "map" in why:
        if not hasattr(getattr(keras, "dtype_policies", None), "DTypePolicyMap"):
            pytest.skip("needs maps of policies")
        found = keras.dtype_policies.DTypePolicyMap(default_policy=keras.dtype_policies.DTypePolicy("float32"))
    model = _trained(keras, functools.partial(Last, dtype=found))
    before, entries = _state(model), dict(found or {})
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        if why == "a layer refuses" and is_keras2(keras):
            own = Last._set_dtype_policy
            refusing = lambda self, new: refuse() if new.name != "float32" else own(self, new)  # noqa: E731
            patch.setattr(Last, "_set_dtype_policy", refusing)
        elif why == "a layer refuses":
            patch.setattr(Last, "dtype_policy", property(Last.dtype_policy.fget, refuse))
        message = "injected" if why == "a layer refuses" else "does not scale the loss"
        with pytest.raises((RuntimeError, UserWarning), match=message):
            tfmp.set_precision(model, "O2")
    assert (_state(model), dict(found or {})) == (before, entries)


def _floats(*shape: int) -> np.ndarray:
    return (np.cos(np.arange(np.prod(shape))) / 2 + 0.5).reshape(shape).astype(np.float32)


_VECTOR, _SEQUENCE, _IMAGE = _floats(2, 4), _floats(2, 4, 3), _floats(2, 6, 6, 3)
_IDS = np.array([[1, 2, 3], [4, 5, 6]])

#: What makes a layer that is more than a function, with the layers of a Keras; and the inputs of its call.
_RUN: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "BatchNormalization": (lambda layers: layers.BatchNormalization(), (_VECTOR,)),
    "RMSNormalization": (lambda layers: layers.RMSNormalization(), (_VECTOR,)),
    "Normalization": (lambda layers: layers.Normalization(mean=1.0, variance=4.0), (_VECTOR,)),
    "LSTM": (lambda layers: layers.LSTM(2), (_SEQUENCE,)),
    "RNN": (lambda layers: layers.RNN([layers.LSTMCell(2), layers.SimpleRNNCell(2)]), (_SEQUENCE,)),
    "Bidirectional": (lambda layers: layers.Bidirectional(layers.LSTM(2)), (_SEQUENCE,)),
    "TimeDistributed": (lambda layers: layers.TimeDistributed(layers.Dense(2)), (_SEQUENCE,)),
    "Conv2D": (lambda layers: layers.Conv2D(2, 2), (_IMAGE,)),
    "ConvLSTM2D": (lambda layers: layers.ConvLSTM2D(2, 2), (_floats(2, 2, 4, 4, 2),)),
    "SpectralNormalization": (lambda layers: layers.SpectralNormalization(layers.Conv2D(2, 2)), (_IMAGE,)),
    "Resizing": (lambda layers: layers.Resizing(4, 4), (_IMAGE,)),
    "RandomTranslation": (lambda layers: layers.RandomTranslation(0.2, 0.2), (_IMAGE,)),
    "Attention": (lambda layers: layers.Attention(use_scale=True), ([_SEQUENCE, 2 * _SEQUENCE],)),
    "MultiHeadAttention": (lambda layers: layers.MultiHeadAttention(2, 2, dropout=0.5), (_SEQUENCE, _SEQUENCE)),
    "GroupQueryAttention": (lambda layers: layers.GroupQueryAttention(2, 2, 1), (_SEQUENCE, _SEQUENCE)),
    "Embedding": (lambda layers: layers.Embedding(8, 2), (_IDS,)),
    "ReversibleEmbedding": (lambda layers: layers.ReversibleEmbedding(8, 2), (_IDS,)),
    "CategoryEncoding": (lambda layers: layers.CategoryEncoding(8), (_IDS,)),
    "Discretization": (lambda layers: layers.Discretization([0.5], output_mode="count"), (_VECTOR,)),
    "IntegerLookup": (lambda layers: layers.IntegerLookup(vocabulary=[1, 2, 3]), (_IDS,)),
    "STFTSpectrogram": (lambda layers: layers.STFTSpectrogram("log", 16, 8, 16), (_floats(2, 64, 1),)),
    "MelSpectrogram": (lambda layers: layers.MelSpectrogram(16, 8, num_mel_bins=4), (_floats(2, 64),)),
}
_EVERY = [
    pytest.param(keras, name, id=f"{id_}-{name}")
    for id_, keras in installed().items()
    for name in _RUN
    if hasattr(keras.layers, name)
]
#: Classes that hold constants of a type, or compute in another type than that of their policy.
_NOT_SET = ("CategoryEncoding", "Discretization", "IntegerLookup", "Normalization")


def _ran(keras: ModuleType, name: str) -> tuple[Any, list[Any]]:
    """Return a layer, and the types of its gradients, after it ran forward and backward."""
    make, inputs = _RUN[name]
    layer = make(keras.layers)
    given = tf.nest.map_structure(tf.convert_to_tensor, inputs)
    layer(*given)
    weights = [each if isinstance(each, tf.Variable) else each.value for each in layer.trainable_variables]
    with tf.GradientTape() as tape:
        outputs = [each for each in tf.nest.flatten(layer(*given)) if each.dtype.is_floating]
        loss = tf.add_n([tf.reduce_mean(tf.cast(each, tf.float32) ** 2) for each in outputs] or [tf.constant(0.0)])
    found = tape.gradient(loss, weights) if weights else []
    return layer, [each.dtype.name for each in found if each is not None]


def _made_under(keras: ModuleType, name: str, level: str, global_policy: Callable[[str], None]) -> Any:
    """Return a layer that was made under a level and trained; skip the test if Keras itself cannot do that."""
    try:
        with tfmp.precision(level):
            layer, grads = _ran(keras, name)
    except Exception as error:
        global_policy("float16" if level == "O3" else "mixed_float16")
        with pytest.raises(type(error)):
            _ran(keras, name)
        pytest.skip(f"Keras {keras.__version__} itself cannot run {name} in float16: {type(error).__name__}")
    is_stored_half = level == "O3" and layer.compute_dtype == "float16"
    # Keras 2 stores the weights of batch normalization in float32 under every policy.
    is_stored_half &= not (is_keras2(keras) and name == "BatchNormalization")
    stored = {tf.as_dtype(each.dtype).name for each in layer.trainable_variables}
    assert stored | {*grads} <= {"float16" if is_stored_half else "float32"}
    return layer


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(("keras", "name"), _EVERY)
def test_layer_runs_forward_and_backward_and_is_set_and_set_back(
    keras: ModuleType, name: str, level: str, global_policy: Callable[[str], None]
) -> None:
    made = _made_under(keras, name, level, global_policy)
    make, inputs = _RUN[name]
    layer, given = make(keras.layers), tf.nest.map_structure(tf.convert_to_tensor, inputs)
    first, second = (outputs(layer, *given) for _ in range(2))
    if name in _NOT_SET:
        # What counts, or normalizes inputs, computes as in float32; but at O3, inputs are normalized in float16.
        assert outputs(made, *given) == first or (name, level) == ("Normalization", "O3")
        return
    if level == "O3":
        return
    before = policy(layer)
    tfmp.set_precision(layer, level)
    assert policy(layer) == policy(made)
    assert [dtype for dtype, _ in outputs(layer, *given)] == [dtype for dtype, _ in outputs(made, *given)]
    tfmp.set_precision(layer, "O0")
    assert policy(layer) == before
    if first == second and not name.startswith("Random"):
        # Others draw random numbers, or count.
        assert outputs(layer, *given) == first
