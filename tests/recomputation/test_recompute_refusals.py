"""What recompute, Recompute and recompute_layers refuse, by name and with advice; and what they allow."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras as installed_keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import WAYS, data, dense, fitted, is_keras3
from kerases import for_every_keras

import tfmp

tf1 = tf.compat.v1


def _random_in_a_loop(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda x: x[0] < 3, lambda x: [x + tf.random.uniform([2])], [x])


def _random_in_a_function(x: tf.Tensor) -> tf.Tensor:
    @tf.function
    def inner() -> tf.Tensor:
        return tf.cond(x[0] > 0, lambda: tf.random.normal([2]), lambda: x)

    return inner()


_VARIABLE = tf.Variable(1.0)
_GENERATOR = tf.random.Generator.from_seed(1)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: tf.nn.dropout(x, 0.5), r"'dropout/.*' \(RandomUniform\) draws other random numbers"),
        (tf.random.shuffle, r"\(RandomShuffle\) draws other random numbers"),
        (lambda x: x * _GENERATOR.normal([2]), r"\(RngReadAndSkip\) draws other random numbers"),
        (lambda x: x[0] * tf.nn.fractional_max_pool(tf.zeros([1, 4, 4, 1]), 1.5)[0], r"\(FractionalMaxPool\) draws"),
        (_random_in_a_loop, r"'while/.*random_uniform/RandomUniform' \(RandomUniform\) draws"),
        (_random_in_a_function, r"\(RandomStandardNormal\) draws"),
        (lambda x: x * _VARIABLE.assign_add(x[0]), r"\(AssignAddVariableOp\) changes a variable, which would happen"),
        (lambda x: tf.py_function(lambda x: x, [x], tf.float32), r"\(EagerPyFunc\) keeps state or acts outside"),
        (lambda x: x * tf.cast(tf.timestamp(), tf.float32), r"\(Timestamp\) keeps state or acts outside"),
    ],
)
def test_state_is_refused_by_name_with_advice(function: Any, message: str, in_function: bool) -> None:
    recomputed, before = tfmp.recompute(function), float(_VARIABLE)
    with pytest.raises(ValueError, match=f"cannot be recomputed: its op .*{message}"):
        (tf.function(recomputed) if in_function else recomputed)(tf.constant([1.0, 2.0]))
    assert float(_VARIABLE) == before


def _read_in_a_conditional(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0, lambda: x * _VARIABLE, lambda: tf.gather(_VARIABLE[tf.newaxis], [0]) * x)


_TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0]), 0.0)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * _VARIABLE,
        lambda x: (tf.print(x), x)[1],
        lambda x: (tf.debugging.assert_greater(x, 0.0), x)[1],
        _read_in_a_conditional,
        lambda x: x * tf.random.stateless_uniform([2], [1, 2]),
        lambda x: tf.nn.experimental.stateless_dropout(x, 0.5, [1, 2]),
        lambda x: tf.map_fn(lambda x: x + 1, x),
        lambda x: tf.numpy_function(lambda x: x, [x], tf.float32, stateful=False),
        lambda x: tf.debugging.check_numerics(x, "not finite"),
        lambda x: x * _TABLE.lookup(tf.cast(x, tf.int32)),
    ],
)
def test_what_does_the_same_twice_is_allowed(function: Callable[[tf.Tensor], tf.Tensor], in_function: bool) -> None:
    def result_and_gradient(called: Callable[[tf.Tensor], tf.Tensor]) -> list[Any]:
        x = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = called(x)
        return [each if each is None else each.numpy().tolist() for each in (y, tape.gradient(y, x))]

    recomputed = tfmp.recompute(function)
    assert result_and_gradient(tf.function(recomputed) if in_function else recomputed) == result_and_gradient(function)


def _called(function: Callable[..., Any]) -> object:
    with tf.GradientTape():
        return tfmp.recompute(function)(tf.constant(2.0))


def _second_kind_of_call() -> object:
    block = tfmp.recompute(lambda x, training: tf.nn.dropout(x, 0.5) if training else x)
    assert float(block(tf.constant(2.0), training=False)) == 2
    return block(tf.constant(2.0), training=True)


def _state_that_is_kept_later() -> object:
    rate = 0.0
    block = tfmp.recompute(lambda x: tf.nn.dropout(x, rate) if rate else x)
    with tf.GradientTape():
        block(tf.ones([2]))
        rate = 0.5
        return block(tf.ones([2]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tfmp.recompute(3), TypeError, r"function must be callable, got 3: pass the function itself"),
        (lambda: tfmp.recompute(installed_keras.layers.Dense(2, name="head")), TypeError, r"'head': write tfmp\.Rec"),
        (lambda: tfmp.recompute(tfmp.recompute(tf.tanh)), ValueError, "tanh is recomputed already: a wrapper around"),
        (lambda: _called(lambda x: x * float(x.numpy())), ValueError, "<lambda> cannot be recomputed in eager code"),
        (lambda: _called(lambda x: x * tf.Variable(2.0)), ValueError, r"<lambda> makes variables on its second run"),
        (_second_kind_of_call, ValueError, r"\(RandomUniform\) draws other random numbers"),
        (_state_that_is_kept_later, ValueError, r"\(RandomUniform\) draws other random numbers"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def _gradient(function: Callable[[tf.Tensor], tf.Tensor]) -> object:
    x = tf.constant([1.0, 2.0])
    return tf.gradients(tfmp.recompute(function)(x), x)


def _asking(*requests: tuple[str, list[int]]) -> object:
    """Ask for another variable in each run."""
    asked = iter(requests)

    def block(x: tf.Tensor) -> tf.Tensor:
        for name, shape in next(asked):
            x *= tf.reduce_sum(tf1.get_variable(name, shape))
        return x

    return _gradient(block)


def _assigning(use_resource: bool) -> object:
    count = tf1.get_variable("count", initializer=0.0, use_resource=use_resource)
    return _gradient(lambda x: x * tf1.assign_add(count, 1.0))


_A, _B, _A3 = ("a", [2]), ("b", [2]), ("a", [3])


@pytest.mark.graph
@pytest.mark.usefixtures("control_flow_v1")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _gradient(lambda x: tf.nn.dropout(x, 0.5)), r"its op 'dropout/.*' \(RandomUniform\) draws"),
        (lambda: _gradient(lambda x: x * tf1.Variable(2.0)), r"<lambda> makes variables on its second run"),
        (lambda: _asking([_A], [_B]), r"asks for 'b' of shape \(2,\), where it asked for 'a' of shape \(2,\)"),
        (lambda: _asking([_A], [_A3]), r"asks for 'a' of shape \(3,\), where it asked for 'a' of shape \(2,\)"),
        (lambda: _asking([_A], [_A, _B]), "where it asked for none at first"),
        (lambda: _assigning(use_resource=False), r"changes a variable, which would happen twice"),
        (lambda: _assigning(use_resource=True), r"changes a variable, which would happen twice"),
        (
            lambda: tf.while_loop(lambda x: x < 3, tfmp.recompute(lambda x: x * 2), [1.0]),
            "the body of a tf.while_loop of TF1",
        ),
    ],
)
def test_what_cannot_be_recomputed_is_refused_in_a_graph(call: Any, message: str, session: tf1.Session) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.graph
def test_arrays_of_tf1_are_allowed(session: tf1.Session) -> None:
    y = tfmp.recompute(lambda x: tf.TensorArray(tf.float32, 2).write(0, x).write(1, x * 2).stack())(tf.constant(3.0))
    assert session.run(y).tolist() == [3, 6]


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
        (lambda keras: tfmp.Recompute(tfmp.Recompute(dense(keras, 2))), ValueError, "already: wrap it once"),
        (lambda keras: _Mine(dense(keras, 2)), TypeError, "_Mine subclasses tfmp.Recompute, .*: wrap a layer instead"),
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


def _of_call(call: Callable[[Any, Any], Any]) -> Callable[[ModuleType], Any]:
    def make(keras: ModuleType) -> Any:
        layer = type("Layer", (keras.layers.Layer,), {"call": call})(name="block")
        layer.calls = tf.Variable(0.0, name="calls")
        return layer

    return make


_noise = _of_call(lambda self, x: x + tf.random.normal(tf.shape(x)))
_counter = _of_call(lambda self, x: x * self.calls.assign_add(1.0))


def _normalizing_its_weight(keras: ModuleType) -> Any:
    return keras.layers.SpectralNormalization(keras.layers.Dense(8, name="dense"), name="block")


def _legacy_dropout(keras: ModuleType) -> Any:
    drop = keras.layers.Dropout(0.5, rng_type="legacy_stateful", name="my_dropout")
    return keras.Sequential([dense(keras, 8), drop], name="block")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_noise, "its op .*draws other random numbers the second time"),
        (_counter, "its op .*changes a variable, which would happen twice"),
        (_normalizing_its_weight, "its call assigns .*dense/kernel"),
        (_legacy_dropout, "its op .*my_dropout.*enable_tf_random_generator"),
    ],
)
@for_every_keras()
def test_state_that_keras_does_not_put_back_is_refused_in_training(
    keras: ModuleType, make: Callable[[ModuleType], Any], message: str, way: str
) -> None:
    if is_keras3(keras) == (make is _legacy_dropout):
        pytest.skip("is about another Keras")
    net = keras.Sequential([keras.Input([8]), tfmp.Recompute(make(keras)), dense(keras, 1)])
    with pytest.raises(ValueError, match=rf"the layer 'block'.* cannot be recomputed: {message}"):
        fitted(net, **WAYS[way])
    if make is not _noise and make is not _counter:
        # Without gradients it may do so.
        assert net.predict(data()[0], verbose=0).shape == (24, 1)
        assert np.isfinite(net.evaluate(*data(), verbose=0))


def _of_class(keras: ModuleType, name: str, **attributes: Any) -> Any:
    inputs = keras.Input([4])
    return type(name, (keras.Model,), attributes)(inputs, dense(keras, 1, name="head")(inputs), name="net")


def _with_own_call(keras: ModuleType) -> Any:
    return _of_class(keras, "Doubled", call=lambda self, x, training=None, mask=None: x * 2)


def _with_attribute_that_cannot_be_set(keras: ModuleType) -> Any:
    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == "limit" and value < 0:
            raise ValueError("limit is negative")
        keras.Model.__setattr__(self, name, value)

    model = _of_class(keras, "Once", __setattr__=set_attribute)
    vars(model)["limit"] = -1
    return model


def _subclassed(keras: ModuleType) -> Any:
    return type("Net", (keras.Model,), {"call": lambda self, x: x})(name="subclassed")


def _functional(keras: ModuleType) -> Any:
    inputs = keras.Input([8])
    block = keras.Sequential([dense(keras, 4, name="up"), dense(keras, 8, name="down")], name="block")
    return keras.Model(inputs, dense(keras, 1, name="head")(block(inputs)), name="net")


_LAYERS = "block, block/up, block/down, head"


@pytest.mark.parametrize(
    ("make", "patterns", "error", "message"),
    [
        (_functional, ["block", "up"], ValueError, f"'up' matches none of the model's layers: {_LAYERS}"),
        (_functional, [], ValueError, f"pass a pattern for the layers to recompute; the model's layers are {_LAYERS}"),
        (_functional, [3], TypeError, "patterns must be a list of regular expressions, and it holds 3 of type int"),
        (_subclassed, ["head"], TypeError, "'subclassed' is a Net, which is subclassed and cannot be rebuilt: wrap"),
        (lambda _: "net", ["head"], TypeError, "model must be a model of Keras, got 'net' of type str"),
        (_with_own_call, ["head"], TypeError, "'net' is of the class Doubled and .* a `call` of its own.* Wrap its"),
        (_with_attribute_that_cannot_be_set, ["head"], TypeError, "of the class Once .*: ValueError: limit is"),
    ],
)
@for_every_keras()
def test_model_whose_layers_cannot_be_recomputed_is_refused(
    keras: ModuleType, make: Any, patterns: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tfmp.recompute_layers(make(keras), *patterns)
