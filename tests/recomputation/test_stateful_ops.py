from collections.abc import Callable

import pytest
import tensorflow as tf

from tfmp.recomputation.stateful_ops import refuse_state


def _refuse_what(function: Callable[[tf.Tensor], object]) -> None:
    traced = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([2]))
    refuse_state(traced.graph.get_operations(), "block")


def _random_in_a_loop(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda x: x[0] < 3, lambda x: [x + tf.random.uniform([2])], [x])


def _random_in_a_function(x: tf.Tensor) -> tf.Tensor:
    @tf.function
    def inner() -> tf.Tensor:
        return tf.cond(x[0] > 0, lambda: tf.random.normal([2]), lambda: x)

    return inner()


_VARIABLE = tf.Variable(1.0)
_GENERATOR = tf.random.Generator.from_seed(1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: tf.nn.dropout(x, 0.5), r"'dropout/.*' \(RandomUniform\) draws other random numbers"),
        (tf.random.shuffle, r"\(RandomShuffle\) draws other random numbers"),
        (lambda x: _GENERATOR.normal([2]), r"\(RngReadAndSkip\) draws other random numbers"),
        (lambda x: tf.nn.fractional_max_pool(tf.zeros([1, 4, 4, 1]), 1.5), r"\(FractionalMaxPool\) draws"),
        (_random_in_a_loop, r"'while/.*random_uniform/RandomUniform' \(RandomUniform\) draws"),
        (_random_in_a_function, r"\(RandomStandardNormal\) draws"),
        (lambda x: _VARIABLE.assign_add(x[0]), r"\(AssignAddVariableOp\) changes a variable, which would happen twice"),
        (lambda x: tf.py_function(lambda x: x, [x], tf.float32), r"\(EagerPyFunc\) keeps state or acts outside"),
        (lambda x: tf.timestamp(), r"\(Timestamp\) keeps state or acts outside"),
    ],
)
def test_state_is_refused_by_name_with_advice(function: Callable[[tf.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"block cannot be recomputed: its op .*{message}"):
        _refuse_what(function)


def _printed(x: tf.Tensor) -> tf.Tensor:
    tf.print(x)
    return x


def _asserted(x: tf.Tensor) -> tf.Tensor:
    tf.debugging.assert_greater(x, 0.0)
    return x


def _read_in_a_conditional(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0, lambda: x * _VARIABLE, lambda: tf.gather(_VARIABLE[tf.newaxis], [0]) * x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * _VARIABLE,
        _printed,
        _asserted,
        _read_in_a_conditional,
        lambda x: tf.random.stateless_uniform([2], [1, 2]),
        lambda x: tf.nn.experimental.stateless_dropout(x, 0.5, [1, 2]),
        lambda x: tf.map_fn(lambda x: x + 1, x),
        lambda x: tf.numpy_function(lambda x: x, [x], tf.float32, stateful=False),
        lambda x: tf.debugging.check_numerics(x, "not finite"),
    ],
)
def test_what_does_the_same_twice_is_allowed(function: Callable[[tf.Tensor], object]) -> None:
    _refuse_what(function)


def test_lookup_in_a_table_is_allowed() -> None:
    keys = tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0])
    table = tf.lookup.StaticHashTable(keys, 0.0)
    _refuse_what(lambda x: table.lookup(tf.cast(x, tf.int32)))


@pytest.mark.graph
def test_arrays_and_assignments_of_tf1() -> None:
    with tf.Graph().as_default() as graph:
        array = tf.TensorArray(tf.float32, 2).write(0, 1.0).stack()
        refuse_state([array.op, *(tensor.op for tensor in array.op.inputs)], "block")
        count = tf.compat.v1.get_variable("count", initializer=0.0, use_resource=False)
        start = len(graph.get_operations())
        tf.compat.v1.assign_add(count, 1.0)
        with pytest.raises(ValueError, match=r"its op 'AssignAdd' \(AssignAdd\) changes a variable"):
            refuse_state(graph.get_operations()[start:], "block")
