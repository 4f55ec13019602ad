from collections.abc import Sequence

import pytest
import tensorflow as tf
from graph_ops import needed_for, read_for

from tfmp.recomputation.gradient import recomputed


def _squares(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [x**2 for x in inputs]


@pytest.mark.parametrize("jit_compile", [None, False, True], ids=["eager", "function", "xla"])
def test_gradients_are_those_of_the_function(jit_compile: bool | None) -> None:
    v = tf.Variable(5.0)

    def gradients() -> list[tf.Tensor]:
        x, y = tf.constant(2.0), tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            square, product = recomputed(lambda inputs: [inputs[0] ** 2, inputs[0] * inputs[1] * v], [x, y])
        return tape.gradient([square, product], [x, y, v])

    function = gradients if jit_compile is None else tf.function(gradients, jit_compile=jit_compile)
    assert [float(grad) for grad in function()] == [19, 10, 6]


def test_captured_tensors_and_variables_that_are_listed_have_gradients() -> None:
    captured, constant, x = tf.constant(2.0), tf.Variable(3.0, trainable=False), tf.constant(5.0)
    with tf.GradientTape() as tape:
        tape.watch([captured, constant])
        (y,) = recomputed(lambda inputs: [inputs[0] * captured * constant], [x], [captured, constant])
    assert [float(grad) for grad in tape.gradient(y, [captured, constant])] == [15, 10]


def test_first_call_may_be_another_function() -> None:
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        (y,) = recomputed(_squares, [x], first_call=lambda inputs: [tf.constant(7.0)])
    assert (float(y), float(tape.gradient(y, x))) == (7, 4)


def test_second_call_waits_for_the_gradients_of_the_results() -> None:
    """A graph would otherwise merge both calls into one, or run them together."""
    marks = []

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,) = recomputed(lambda inputs: [tf.exp(inputs[0])], [x])
            loss = tf.sin(y)
        marks.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return tape.gradient(loss, x)

    operations = tf.function(gradient).get_concrete_function(tf.TensorSpec([])).graph.get_operations()
    (again,) = [op for op in operations[marks[-1] :] if op.type == "Exp"]
    assert "Cos" in {op.type for op in needed_for(again)}


def test_second_call_waits_within_xla_where_control_dependencies_do_nothing() -> None:
    @tf.function(jit_compile=True)
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,) = recomputed(lambda inputs: [tf.exp(tf.exp(inputs[0]))], [x])
            loss = tf.sin(y)
        return tape.gradient(loss, x)

    program = gradient.experimental_get_compiler_ir(tf.zeros([3]))(stage="optimized_hlo")
    # Two in each of the two runs; XLA would merge the runs if it could.
    assert program.count(" exponential(") >= 4


def test_each_gradient_waits_until_the_second_call_has_read_all_variables() -> None:
    """Else an update of `second` might come before it is read for the gradient of `first`."""
    first, second = tf.Variable(2.0), tf.Variable(3.0)

    @tf.function
    def gradients(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            (y,) = recomputed(lambda inputs: [inputs[0] * first * second], [x])
        grads = tape.gradient(y, [first, second])
        # The gradient of each factor is computed from the other one.
        assert read_for(grads[0]) == read_for(grads[1])
        assert len(read_for(grads[0])) > 1

    gradients(tf.constant(1.0))


def test_results_that_depend_on_nothing_have_no_gradients() -> None:
    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        assert tf.gradients(recomputed(lambda inputs: [tf.constant(1.0)], [x]), x) == [None]
        return x

    gradient(tf.constant(1.0))
