"""check_precision refuses what it cannot check, and leaves models of every Keras and the random generators alone."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import called, check, composed, data, dense_model, overflowing_within, state, stateful_model
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


class _Interrupted(Exception):  # noqa: N818 - not an error of the check
    pass


@for_every_keras()
def test_error_of_the_loss_or_of_a_layer_leaves_the_model_as_before(keras: ModuleType) -> None:
    calls, last = list[str](), [0]

    def interrupted(_: Any, x: tf.Tensor) -> tf.Tensor:
        calls.append(tf.as_dtype(x.dtype).name)
        if len(calls) == last[0]:
            raise _Interrupted
        return x

    model = _trained(keras)
    with_layer = called(keras.Sequential([keras.Input([4]), composed(keras, interrupted), keras.layers.Dense(1)]))
    before, before_layer, expected = state(model), state(with_layer), check(model, "mse", [data(1)]).to_json()
    # The calls are those in float32, in float32 for the comparison, and in float16.
    for last[0] in (1, 2, 3):
        calls.clear()
        with pytest.raises(_Interrupted):
            check(model, lambda y, x: (tf.cast(interrupted(None, x), tf.float32) - y) ** 2, [data(1)])
        assert calls == ["float32", "float32", "float16"][: last[0]]
        assert state(model) == before
        calls.clear()
        with pytest.raises(_Interrupted):
            check(with_layer, "mse", [data()])
        assert state(with_layer) == before_layer
    assert check(model, "mse", [data(1)]).to_json() == expected


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


_BATCHES = [tf.constant(1.0)]


def _times(factor: float) -> Callable[[tf.Tensor], tf.Tensor]:
    w = tf.Variable(1.0, name="w")
    return lambda x: x * w * factor


def _raise(_: Any) -> tf.Tensor:
    raise TypeError("mine")


def _check(model: Any = None, loss_fn: Any = None, batches: Any = None, **settings: Any) -> object:
    return check(model or _times(1), loss_fn, iter(_BATCHES) if batches is None else batches, **settings)


def _of_graph(factor: float, loss_fn: Any = None, with_session: bool = True) -> object:
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        v = tf.compat.v1.get_variable("v", [], initializer=tf.compat.v1.ones_initializer())
        session.run(v.initializer)
        if with_session:
            return check(v * factor, loss_fn, [None])
    with graph.as_default():
        return check(v * factor, loss_fn, [None])


def _with_other_variables() -> object:
    half = tf.Variable(2.0, dtype=tf.float16)
    return _check(in_float16=lambda x: tf.cast(x, tf.float16) * half)


def _with_an_infinite_gradient() -> object:
    w = tf.Variable(0.0, name="w")
    return check(lambda x: tf.sqrt(w * x), None, _BATCHES)


def _with_a_generator_twice() -> object:
    return check(lambda x: x, None, [None, None], in_float16=lambda x: x)


_NO_BATCHES = r"batches is empty: pass a few batches, as the training would take them\."
_NO_GRADIENTS = r"the loss has no gradients other than 0: there is nothing that float16"
_COUNT = r"num_batches must be a whole number from 1 to .*, got"
_MODEL = "model must be a model of Keras, a function, or the loss of a TF1 graph, got .* of type"
_LOSS = "loss_fn must be a function, a loss of Keras or its name, .* of type"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _check(tolerance=0), ValueError, r"tolerance must be greater than 0, got 0\."),
        (lambda: _check(tolerance=float("nan")), ValueError, r"tolerance must be finite, got nan\."),
        (lambda: _check(tolerance="0.1"), TypeError, r"tolerance must be a number, got '0\.1' of type str\."),
        (lambda: _check(num_batches=0), ValueError, rf"{_COUNT} 0\."),
        (lambda: _check(num_batches=1.5), ValueError, rf"{_COUNT} 1\.5\."),
        (lambda: check(3, None, _BATCHES), TypeError, rf"{_MODEL} int\."),
        (lambda: _check(loss_fn="mse"), TypeError, r"loss_fn must be a function, since the model is one, got 'mse'\."),
        (lambda: _check(loss_fn={"a": "mse"}), TypeError, rf"{_LOSS} dict\. "),
        (lambda: _check(session=object()), ValueError, r"a function needs no session: leave it out\."),
        (lambda: _check(in_float16=_raise), TypeError, r"^mine$"),
        (lambda: _check(batches=iter([])), ValueError, _NO_BATCHES),
        (lambda: _check(batches=tf.data.Dataset.range(0)), ValueError, _NO_BATCHES),
        (lambda: _check(_times(float("inf"))), ValueError, "the loss is inf in float32 already, which no precision"),
        (lambda: _check(_times(float("nan"))), ValueError, "the loss is nan in float32 already, which no precision"),
        (lambda: _check(_times(0)), ValueError, _NO_GRADIENTS),
        (lambda: _check(lambda x: x * 2), ValueError, _NO_GRADIENTS),
        (_with_other_variables, ValueError, "the loss in float16 does not depend on w as that in float32 does"),
        (_with_an_infinite_gradient, ValueError, "gradients are infinite or NaN in float32 already, .* of w"),
        (_with_a_generator_twice, ValueError, "would give in_float16 other batches than the loss in float32"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.graph
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _of_graph(2.0, "mse"), r"the loss of a graph needs no loss_fn: leave it"),
        (lambda: _of_graph(2.0, with_session=False), "there is no session: pass session"),
        (lambda: _of_graph(0.0), _NO_GRADIENTS),
        (lambda: _of_graph(float("inf")), "the loss is inf in float32 already"),
    ],
)
def test_bad_graph_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_refused_check_takes_no_batch_and_looks_at_nothing_any_more() -> None:
    given = iter(_BATCHES)
    with pytest.raises(ValueError, match="tolerance"):
        check(_times(1), None, given, tolerance=0)
    assert len(list(given)) == 1
    with pytest.raises(TypeError, match="mine"):
        check(_raise, None, _BATCHES)
    assert tfmp.ranges.probe(_BATCHES[0], "one") is _BATCHES[0]


def _of_integers(keras: ModuleType) -> Any:
    counting = composed(keras, lambda _, x: tf.cast(x, tf.float32), settings={"dtype": "int32", "name": "count"})
    layers = [counting, keras.layers.Dense(1)]
    return called(keras.Sequential([keras.Input([4], dtype="int32"), *layers], name="net"))


def _quantized(keras: ModuleType) -> Any:
    if not keras.__version__.startswith("3."):
        pytest.skip("Keras 2 quantizes no layers")
    skip_before((3, 6), keras, "it quantizes no layer whose policy is float32")
    model = dense_model(keras)
    for layer in model.layers:
        layer.quantize("int8")
    return model


def _compiled(keras: ModuleType) -> Any:
    model = dense_model(keras)
    model.compile("sgd", "mse")
    return model


_X, _Y = data()
_GOOD = [(_X, _Y)]
_INTEGERS = [(np.ones([2, 4], np.int32), np.ones([2, 1]))]
_LOST = "float16 cannot take the place of integers, in which these layers compute: "
_ADVICE = r"pass the data in batches, such as \[\(x\[:32\], y\[:32\]\)\] or tf\.data\.Dataset\.from_tensor_slices"


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (dense_model, ("mse", []), r"batches is empty"),
        (dense_model, ("mse", [(_X, np.nan * _Y)]), r"the loss is nan in float32 already"),
        (dense_model, ("mse", [(_X, _Y), (_X, np.inf * np.ones_like(_Y))]), r"the loss is inf in float32 already"),
        (dense_model, (lambda labels, outputs: outputs * 0, _GOOD), r"the loss has no gradients other than 0"),
        (dense_model, (None, _GOOD), r"loss_fn is None, and the model 'net' is not compiled with a loss: pass"),
        (dense_model, ("no_such_loss", _GOOD), "no_such_loss"),
        (_compiled, (None, (_X, _Y)), rf"got ndarray of shape \(8, 4\): {_ADVICE}"),
        (_compiled, ("mse", [_X, _Y]), rf"got ndarray of shape \(8, 4\): {_ADVICE}"),
        (_compiled, ("mse", _X), rf"got ndarray of shape \(4,\): {_ADVICE}"),
        (_compiled, (None, {"x": _X}), rf"got str: {_ADVICE}"),
        (_of_integers, ("mse", _INTEGERS), rf"{_LOST}count\. Pass the part"),
        (_quantized, ("mse", _GOOD), rf"{_LOST}hidden, o\. Pass .* the model before it was quantized"),
    ],
)
@for_every_keras()
def test_model_of_keras_is_refused_with_its_reason_and_as_before(
    keras: ModuleType, make: Callable[[ModuleType], Any], arguments: Any, message: str
) -> None:
    model = make(keras)
    before = state(model)
    with pytest.raises((TypeError, ValueError), match=message):
        check(model, *arguments)
    assert state(model) == before


@for_every_keras()
def test_model_that_is_not_built_and_arguments_for_functions_are_refused(keras: ModuleType) -> None:
    model = keras.Sequential([keras.layers.Dense(1)], name="net")
    with pytest.raises(ValueError, match=r"the model 'net' has no variables yet: call it on a batch first, or build"):
        check(model, "mse", _GOOD)
    with pytest.raises(ValueError, match=r"a model of Keras needs no variables and no in_float16: leave it out\."):
        check(model, "mse", _GOOD, variables=[], in_float16=model)
