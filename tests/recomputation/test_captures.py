import pytest
import tensorflow as tf

from tfmp.recomputation.captures import captured_tensors, refuse_watched


def test_captured_are_the_floating_tensors_that_are_neither_inputs_nor_results_of_the_ops() -> None:
    outside = tf.constant(5.0)

    @tf.function
    def traced(x: tf.Tensor, y: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        result = x * y * tf.cast(n, tf.float32) * outside
        found = captured_tensors(graph, graph.get_operations()[known:], [x], [result])
        assert [each is y or each is outside for each in found] == [True, True]
        return result

    assert float(traced(tf.constant(1.0), tf.constant(2.0), tf.constant(3))) == 30


def test_what_no_tape_watches_is_not_refused() -> None:
    x, v = tf.constant(1.0), tf.Variable(2.0, trainable=False)
    with tf.GradientTape() as tape:
        refuse_watched([x, v])
        tape.watch(v)
        with pytest.raises(
            ValueError, match=r"uses a variable \(float32, shape \(\)\) that is not among its arguments"
        ):
            refuse_watched([x, v])
