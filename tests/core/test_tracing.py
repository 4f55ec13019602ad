import threading

import pytest
import tensorflow as tf

from tfmp.core.tracing import outside_of_functions, without_autograph


def _larger(value: tf.Tensor) -> tf.Tensor:
    if value > 0:
        value = value + 1
    return value


def _caller(value: tf.Tensor) -> tf.Tensor:
    return _larger(value)


def test_autograph_converts_neither_the_function_nor_its_callees() -> None:
    assert float(tf.function(_caller)(tf.constant(1.0))) == 2
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(without_autograph(_caller))(tf.constant(1.0))


def test_variables_made_outside_of_functions_need_no_second_trace() -> None:
    made: list[tf.Variable] = []
    traces = []

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        traces.append(value)
        if value.shape.rank == len(made):
            made.append(outside_of_functions(lambda: tf.Variable(2.0)))
        return made[-1] * value

    assert float(step(tf.constant(3.0))) == 6
    assert len(traces) == 1
    # TensorFlow refuses variables that a later trace makes.
    assert step(tf.constant([3.0])).numpy().tolist() == [6]
    assert (len(traces), len(made)) == (2, 2)


def test_error_while_variables_are_made_is_raised_in_the_function() -> None:
    def fail() -> None:
        raise ValueError("no variables today")

    with pytest.raises(ValueError, match="no variables today"):
        tf.function(without_autograph(lambda: outside_of_functions(fail)))()


def test_eager_code_and_graphs_and_strategies_need_no_thread() -> None:
    here = threading.get_ident()
    assert outside_of_functions(threading.get_ident) == here
    with tf.Graph().as_default():
        assert outside_of_functions(threading.get_ident) == here
    found: list[int] = []
    function = tf.function(without_autograph(lambda: found.append(outside_of_functions(threading.get_ident))))
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        function()
    with tf.Graph().as_default():
        function()
    assert found == [here, here]
