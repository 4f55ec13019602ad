"""What check_precision refuses, and that it leaves everything as it was."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import called, check, composed, data, dense_model, state
from kerases import for_every_keras, skip_before

import tfmp

_BATCHES = [tf.constant(1.0)]


def _times(factor: float) -> Callable[[tf.Tensor], tf.Tensor]:
    w = tf.Variable(1.0, name="w")
    return lambda x: x * w * factor


def _raise(_: Any) -> tf.Tensor:
    raise TypeError("mine")


def _check(model: Any = None, loss_fn: Any = None, batches: Any = None, **settings: Any) -> object:
    return check(model or _times(1), loss_fn, iter(_BATCHES) if batches is None else batches, **settings)


def _of_graph(loss: Callable[[tf.Variable], tf.Tensor], loss_fn: Any = None, with_session: bool = True) -> object:
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        v = tf.compat.v1.get_variable("v", [], initializer=tf.compat.v1.ones_initializer())
        session.run(v.initializer)
        if with_session:
            return check(loss(v), loss_fn, [None])
    with graph.as_default():
        return check(loss(v), loss_fn, [None])


def _with_other_variables() -> object:
    half = tf.Variable(2.0, dtype=tf.float16)
    return _check(in_float16=lambda x: tf.cast(x, tf.float16) * half)


def _with_an_infinite_gradient() -> object:
    w = tf.Variable(0.0, name="w")
    return check(lambda x: tf.sqrt(w * x), None, _BATCHES)


#: A row that builds a graph of its own.
_graph_row = functools.partial(pytest.param, marks=pytest.mark.graph)

_NO_BATCHES = r"batches is empty: pass a few batches, as the training would take them\."
_NO_GRADIENTS = r"the loss has no gradients other than 0: there is nothing that float16"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _check(tolerance=0), ValueError, r"tolerance must be greater than 0, got 0\."),
        (lambda: _check(tolerance=-0.5), ValueError, r"tolerance must be greater than 0, got -0\.5\."),
        (lambda: _check(tolerance=float("nan")), ValueError, r"tolerance must be finite, got nan\."),
        (lambda: _check(tolerance="0.1"), TypeError, r"tolerance must be a number, got '0\.1' of type str\."),
        (lambda: _check(num_batches=0), ValueError, r"num_batches must be a whole number from 1 to .*, got 0\."),
        (lambda: _check(num_batches=-1), ValueError, r"num_batches must be a whole number from 1 to .*, got -1\."),
        (lambda: _check(num_batches=1.5), ValueError, r"num_batches must be a whole number from 1 to .*, got 1\.5\."),
        *(
            (
                lambda model=model: check(model, None, _BATCHES),
                TypeError,
                "model must be a model of Keras, a function, or the loss of a TF1 graph, got .* of type "
                rf"{type(model).__name__}\.",
            )
            for model in (3, "model", None, [tf.identity])
        ),
        (lambda: _check(loss_fn="mse"), TypeError, r"loss_fn must be a function, since the model is one, got 'mse'\."),
        *(
            (
                lambda loss_fn=loss_fn: _check(loss_fn=loss_fn),
                TypeError,
                rf"loss_fn must be a function, a loss of Keras or its name, .* of type {type(loss_fn).__name__}\. ",
            )
            for loss_fn in ({"a": "mse"}, ["mse"], 3)
        ),
        _graph_row(
            lambda: _of_graph(lambda v: v * 2.0, "mse"), ValueError, r"the loss of a graph needs no loss_fn: leave it"
        ),
        _graph_row(
            lambda: _of_graph(lambda v: v * 2.0, with_session=False), ValueError, "there is no session: pass session"
        ),
        _graph_row(lambda: _of_graph(lambda v: v * 0.0), ValueError, _NO_GRADIENTS),
        _graph_row(lambda: _of_graph(lambda v: v / 0.0), ValueError, "the loss is inf in float32 already"),
        (lambda: _check(session=object()), ValueError, r"a function needs no session: leave it out\."),
        (lambda: _check(in_float16=_raise), TypeError, r"^mine$"),
        (lambda: _check(_raise), TypeError, r"^mine$"),
        *(
            (lambda batches=batches: _check(batches=batches), ValueError, _NO_BATCHES)
            for batches in ((), [], iter([]), tf.data.Dataset.range(0))
        ),
        *(
            (
                lambda factor=factor: _check(_times(float(factor))),
                ValueError,
                rf"the loss is {factor} in float32 already, which no precision or loss scale",
            )
            for factor in ("inf", "-inf", "nan")
        ),
        (lambda: _check(_times(0)), ValueError, _NO_GRADIENTS),
        (lambda: _check(lambda x: x * 2), ValueError, _NO_GRADIENTS),
        (_with_other_variables, ValueError, "the loss in float16 does not depend on w as that in float32 does"),
        (_with_an_infinite_gradient, ValueError, "gradients are infinite or NaN in float32 already, .* of w"),
        (
            lambda: check(lambda x: x, None, [None, None], in_float16=lambda x: x),
            ValueError,
            "would give in_float16 other batches than the loss in float32",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
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


# Keras 3 passes the variables of quantized layers to NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (dense_model, ("mse", []), r"batches is empty"),
        (dense_model, ("mse", [(_X, np.nan * _Y)]), r"the loss is nan in float32 already"),
        (dense_model, ("mse", [(_X, _Y), (_X, np.inf * np.ones_like(_Y))]), r"the loss is inf in float32 already"),
        (dense_model, (lambda labels, outputs: outputs * 0, _GOOD), r"the loss has no gradients other than 0"),
        (dense_model, (None, _GOOD), r"loss_fn is None, and the model 'net' is not compiled with a loss: pass"),
        (dense_model, ("no_such_loss", _GOOD), "no_such_loss"),
        *((_compiled, (loss_fn, (_X, _Y)), rf"got ndarray of shape \(8, 4\): {_ADVICE}") for loss_fn in ("mse", None)),
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
