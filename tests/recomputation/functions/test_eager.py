import pytest
import tensorflow as tf

import tfmp


def test_dropout_is_refused_by_name() -> None:
    def noisy(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.dropout(x, rate=0.5)

    with pytest.raises(ValueError, match=r"noisy cannot be recomputed: its op 'dropout/.*' \(RandomUniform\) draws"):
        tfmp.recompute(noisy)(tf.ones([3]))


def test_function_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ValueError, match=r"<lambda> cannot be recomputed in eager code, because tf.function cannot"):
        tfmp.recompute(lambda x: x * float(x.numpy()))(tf.constant(2.0))


def test_function_that_makes_a_variable_each_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"<lambda> makes variables on its second run"):
        tfmp.recompute(lambda x: x * tf.Variable(2.0))(tf.constant(2.0))


def test_function_is_traced_once_for_each_kind_of_call() -> None:
    traced = []

    @tfmp.recompute
    def block(x: tf.Tensor, flag: bool = True) -> tf.Tensor:
        if not tf.executing_eagerly():
            traced.append(x.shape.rank)
        return x * 2

    for rows in (2, 3, 4):
        block(tf.ones([rows, 2]))
    assert traced == [2]
    block(tf.ones([2, 2]), flag=False)
    block(tf.ones([2, 2]), flag=1)
    block(tf.ones([2]))
    assert traced == [2, 2, 2, 1]


def test_each_kind_of_call_is_checked() -> None:
    @tfmp.recompute
    def block(x: tf.Tensor, training: bool) -> tf.Tensor:
        return tf.nn.dropout(x, 0.5) if training else x

    assert float(block(tf.constant(2.0), training=False)) == 2
    with pytest.raises(ValueError, match=r"\(RandomUniform\) draws other random numbers"):
        block(tf.constant(2.0), training=True)


def test_captured_tensors_may_change_from_call_to_call() -> None:
    first, second = tf.constant(2.0), tf.constant(3.0)
    captured = first
    block = tfmp.recompute(lambda x: x * captured)
    for captured, expected in ((first, [5, None]), (second, [None, 5]), (first, [5, None])):  # noqa: B007 - block uses it
        with tf.GradientTape() as tape:
            tape.watch([first, second])
            y = block(tf.constant(5.0))
        assert [grad if grad is None else float(grad) for grad in tape.gradient(y, [first, second])] == expected
