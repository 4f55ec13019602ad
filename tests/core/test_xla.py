import tensorflow as tf

from tfmp.core.tracing import within_xla


def test_plain_function_is_not_within_xla() -> None:
    seen = []
    tf.function(lambda: seen.append(within_xla()))()
    assert seen == [False]


def test_function_traced_inside_a_compiled_function_is_within_xla() -> None:
    seen = []

    @tf.function
    def inner() -> tf.Tensor:
        seen.append(within_xla())
        return tf.constant(1.0)

    @tf.function(jit_compile=True)
    def outer(flag: tf.Tensor) -> tf.Tensor:
        return tf.cond(flag, inner, lambda: tf.constant(0.0))

    assert float(outer(tf.constant(True))) == 1
    assert seen == [True]


def test_graph_of_a_session_is_not_within_xla() -> None:
    with tf.Graph().as_default():
        assert not within_xla()
