import pytest
import tensorflow as tf

from tfmp.core.distribute import SingleProcess


def test_single_process_has_the_total_and_the_maximum_itself() -> None:
    values = tf.constant([1, -2], tf.int64)
    assert SingleProcess().total(values, "values") is SingleProcess().maximum(values, "values") is values


def test_single_process_agrees_with_itself() -> None:
    usable, max_abs, grads = tf.constant(False), tf.constant(2.0), [tf.constant(1.0), None]
    process = SingleProcess()
    assert process.agree(usable, max_abs, grads, ["kernel", "bias"]) == (usable, max_abs)
    assert process.agree(usable, None, grads, ["kernel", "bias"]) == (usable, None)
    assert process.num_summed == 1


def test_mean_of_a_single_process_is_its_gradients_in_their_own_type() -> None:
    grads = [tf.constant(1.0), None]
    mean = SingleProcess().mean(grads, ["kernel", "bias"], tf.float16)
    assert mean[0] is grads[0]
    assert mean[1] is None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_single_process_acts_by_its_flag(compiled: bool) -> None:
    total, steps, process = tf.Variable(0.0), tf.Variable(0), SingleProcess()

    def step(flag: tf.Tensor) -> None:
        process.conditional_update(
            flag,
            [tf.constant(2.0)],
            lambda grads: tf.group(total.assign_add(grads[0])),
            lambda grads: tf.group(total.assign_sub(2 * grads[0])),
        )
        process.once(lambda: tf.group(steps.assign_add(1)))

    run = tf.function(step) if compiled else step
    for flag in (True, False, True):
        run(tf.constant(flag))
    assert (float(total), int(steps)) == (0, 3)
