"""What tfmp.recompute refuses, by name and with advice; and what it allows."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

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


def _printed(x: tf.Tensor) -> tf.Tensor:
    tf.print(x)
    return x


def _asserted(x: tf.Tensor) -> tf.Tensor:
    tf.debugging.assert_greater(x, 0.0)
    return x


def _read_in_a_conditional(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0, lambda: x * _VARIABLE, lambda: tf.gather(_VARIABLE[tf.newaxis], [0]) * x)


_TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0]), 0.0)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * _VARIABLE,
        _printed,
        _asserted,
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
    recomputed, x = tfmp.recompute(function), tf.constant([1.0, 2.0])
    found = (tf.function(recomputed) if in_function else recomputed)(x)
    assert found.numpy().tolist() == function(x).numpy().tolist()


def _called(function: Callable[..., Any], *args: Any) -> object:
    with tf.GradientTape():
        return tfmp.recompute(function)(*args)


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
        (
            lambda: tfmp.recompute(keras.layers.Dense(2, name="head")),
            TypeError,
            r"got the Keras layer 'head': write tfmp\.Recompute\(layer\)",
        ),
        (
            lambda: tfmp.recompute(tfmp.recompute(tf.tanh)),
            ValueError,
            "tanh is recomputed already: a wrapper around a wrapper",
        ),
        (
            lambda: _called(lambda x: x * float(x.numpy()), tf.constant(2.0)),
            ValueError,
            r"<lambda> cannot be recomputed in eager code, because tf.function cannot",
        ),
        (
            lambda: _called(lambda x: x * tf.Variable(2.0), tf.constant(2.0)),
            ValueError,
            r"<lambda> makes variables on its second run",
        ),
        (_second_kind_of_call, ValueError, r"\(RandomUniform\) draws other random numbers"),
        (_state_that_is_kept_later, ValueError, r"\(RandomUniform\) draws other random numbers"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.fixture
def _control_flow_v1() -> Iterator[None]:
    was_enabled = tf1.control_flow_v2_enabled()
    tf1.disable_control_flow_v2()
    yield
    if was_enabled:
        tf1.enable_control_flow_v2()


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
@pytest.mark.usefixtures("_control_flow_v1")
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
            r"<lambda> cannot be recomputed in the body of a tf.while_loop of TF1",
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
