"""What check_precision refuses, and that it leaves everything as it was."""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import called, check, data, dense_model, state
from kerases import for_every_keras, skip_before

import tfmp

_BATCHES = [tf.constant(1.0)]


def _times(factor: float) -> Callable[[tf.Tensor], tf.Tensor]:
    w = tf.Variable(1.0)
    return lambda x: x * w * factor


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tolerance": 0}, ValueError, r"tolerance must be greater than 0, got 0\."),
        ({"tolerance": -0.5}, ValueError, r"tolerance must be greater than 0, got -0\.5\."),
        ({"tolerance": float("nan")}, ValueError, r"tolerance must be finite, got nan\."),
        ({"tolerance": "0.1"}, TypeError, r"tolerance must be a number, got '0\.1' of type str\."),
        ({"num_batches": 0}, ValueError, r"num_batches must be a whole number from 1 to .*, got 0\."),
        ({"num_batches": -1}, ValueError, r"num_batches must be a whole number from 1 to .*, got -1\."),
        ({"num_batches": 1.5}, ValueError, r"num_batches must be a whole number from 1 to .*, got 1\.5\."),
    ],
)
def test_setting_out_of_range_is_refused_before_a_batch_is_taken(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = iter(_BATCHES)
    with pytest.raises(error, match=message):
        check(_times(1), None, given, **settings)
    assert len(list(given)) == 1


@pytest.mark.parametrize("model", [3, "model", None, tf.constant(1.0), [tf.identity]])
def test_model_of_another_type_is_refused(model: object) -> None:
    kind = type(model).__name__
    message = rf"model must be a model of Keras, a function, or the loss of a TF1 graph, got .* of type {kind}\."
    with pytest.raises(TypeError, match=message):
        check(model, None, _BATCHES)


def test_name_of_a_loss_is_refused_for_a_function() -> None:
    with pytest.raises(TypeError, match=r"loss_fn must be a function, since the model is one, got 'mse'\."):
        check(_times(1), "mse", _BATCHES)


@pytest.mark.parametrize("loss_fn", [{"a": "mse"}, ["mse"], 3])
def test_loss_that_is_no_function_is_refused(loss_fn: Any) -> None:
    kind = type(loss_fn).__name__
    with pytest.raises(
        TypeError, match=rf"loss_fn must be a function, a loss of Keras or its name, .* of type {kind}\. "
    ):
        check(_times(1), loss_fn, _BATCHES)


def test_arguments_of_other_kinds_of_models_are_refused() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss = tf.constant(1.0)
        with pytest.raises(ValueError, match=r"the loss of a graph needs no loss_fn: leave it out\."):
            check(loss, "mse", [{}])
    with pytest.raises(ValueError, match=r"a function needs no session: leave it out\."):
        check(_times(1), None, _BATCHES, session=session)


@for_every_keras()
def test_arguments_for_functions_are_refused_for_a_model_of_keras(keras: ModuleType) -> None:
    model = dense_model(keras)
    with pytest.raises(ValueError, match=r"a model of Keras needs no variables and no in_float16: leave it out\."):
        check(model, "mse", [data()], variables=[], in_float16=model)


def test_error_of_a_function_in_float16_is_passed_on() -> None:
    with pytest.raises(TypeError, match=r"^mine$"):
        check(_times(1), None, _BATCHES, in_float16=_raise)


def _raise(_: Any) -> tf.Tensor:
    raise TypeError("mine")


@pytest.mark.parametrize("batches", [(), [], iter([]), tf.data.Dataset.from_tensors(1.0).take(0)])
def test_no_batches_are_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match=r"batches is empty: pass a few batches, as the training would take them\."):
        check(_times(1), None, batches)


@pytest.mark.parametrize("loss_fn", ["mse", None])
@for_every_keras()
def test_arrays_in_place_of_batches_are_refused_with_what_to_write(keras: ModuleType, loss_fn: str | None) -> None:
    model, (x, y) = dense_model(keras), data()
    model.compile("sgd", "mse")
    advice = r"pass the data in batches, such as \[\(x\[:32\], y\[:32\]\)\] or tf\.data\.Dataset\.from_tensor_slices"
    for batches, first in [((x, y), x), ([x, y], x), (x, x[0]), ({"x": x}, "x")]:
        shape = f" of shape {first.shape}" if isinstance(first, np.ndarray) else ""
        with pytest.raises(TypeError, match=re.escape(f"got {type(first).__name__}{shape}: ") + advice):
            check(model, loss_fn, batches)
    for batches in ([(x, y)], tf.data.Dataset.from_tensor_slices((x, y)).batch(4), [[x, y]]):
        assert check(model, loss_fn, batches).suggested_loss_scale > 1


@pytest.mark.parametrize(("factor", "shown"), [(float("inf"), "inf"), (float("-inf"), "-inf"), (float("nan"), "nan")])
def test_loss_that_is_not_finite_in_float32_is_refused(factor: float, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"the loss is {shown} in float32 already, which no precision or loss scale"):
        check(_times(factor), None, _BATCHES)


@pytest.mark.parametrize("function", [_times(0), lambda x: x * 2])
def test_loss_without_gradients_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"the loss has no gradients other than 0: there is nothing that float16"):
        check(function, None, _BATCHES)


def test_error_of_a_function_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        check(lambda _: 1 / 0, None, _BATCHES)
    # What the function passes through probes is not looked at any more.
    assert tfmp.ranges.probe(_BATCHES[0], "one") is _BATCHES[0]


@for_every_keras()
def test_model_of_keras_is_refused_with_its_reason_and_as_before(keras: ModuleType) -> None:
    model, (x, y) = dense_model(keras), data()
    before = state(model)
    with pytest.raises(ValueError, match=r"batches is empty"):
        check(model, "mse", [])
    with pytest.raises(ValueError, match=r"the loss is nan in float32 already"):
        check(model, "mse", [(x, np.nan * y)])
    with pytest.raises(ValueError, match=r"the loss has no gradients other than 0"):
        check(model, lambda labels, outputs: outputs * 0, [(x, y)])
    with pytest.raises(ValueError, match=r"loss_fn is None, and the model 'net' is not compiled with a loss: pass"):
        check(model, None, [(x, y)])
    assert state(model) == before


@for_every_keras()
def test_second_batch_with_an_infinite_loss_is_refused(keras: ModuleType) -> None:
    model, (x, y) = dense_model(keras), data()
    before = state(model)
    with pytest.raises(ValueError, match=r"the loss is inf in float32 already"):
        check(model, "mse", [(x, y), (x, np.inf * np.ones_like(y))])
    assert state(model) == before


@for_every_keras()
def test_model_that_is_not_built_is_refused(keras: ModuleType) -> None:
    model = keras.Sequential([keras.layers.Dense(1)], name="net")
    with pytest.raises(ValueError, match=r"the model 'net' has no variables yet: call it on a batch first, or build"):
        check(model, "mse", [data()])


@for_every_keras()
def test_layer_that_computes_in_integers_is_refused_by_name(keras: ModuleType) -> None:
    class Counting(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.cast(x, tf.float32)

    layers = [Counting(dtype="int32", name="count"), keras.layers.Dense(1)]
    model = called(keras.Sequential([keras.Input([4], dtype="int32"), *layers], name="net"))
    before = state(model)
    message = r"float16 cannot take the place of integers, in which these layers compute: count\. Pass the part"
    with pytest.raises(ValueError, match=message):
        check(model, "mse", [(np.ones([2, 4], np.int32), np.ones([2, 1]))])
    assert state(model) == before


# Keras 3 passes its variables to NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@for_every_keras("keras3")
def test_quantized_model_is_refused(keras: ModuleType) -> None:
    skip_before((3, 6), keras, "it quantizes no layer whose policy is float32")
    model = dense_model(keras)
    for layer in model.layers:
        layer.quantize("int8")
    with pytest.raises(
        ValueError, match=r"these layers compute: hidden, o\. Pass .* the model before it was quantized"
    ):
        check(model, "mse", [data()])


@for_every_keras()
def test_name_that_is_no_loss_is_refused(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match="no_such_loss"):
        check(dense_model(keras), "no_such_loss", [data()])


def test_in_float16_with_other_variables_is_refused_with_a_reason() -> None:
    w, half = tf.Variable(2.0, name="w"), tf.Variable(2.0, dtype=tf.float16, name="half")
    with pytest.raises(ValueError, match="w"):
        check(lambda x: x * w, None, [tf.ones([2])], in_float16=lambda x: tf.cast(x, tf.float16) * half)


def test_gradients_that_are_infinite_in_float32_are_an_error() -> None:
    w = tf.Variable(0.0, name="w")
    with pytest.raises(ValueError, match="gradients are infinite or NaN in float32 already, first those of w"):
        check(lambda x: tf.sqrt(w * x), None, [tf.constant(1.0)])


def test_graph_that_reads_its_own_input_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="would give in_float16 other batches than the loss in float32"):
        check(lambda x: x, None, [None, None], in_float16=lambda x: x)
