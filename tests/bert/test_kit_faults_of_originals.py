"""The faults of the published scripts, each in a minimal form, beside the kit, which does not have them.

The faults that need two processes are in `test_kit_horovod.py`.
"""

import time
from collections.abc import Callable

import kit_models
import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp import bert

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1


def _ones(session: tf1.Session) -> tf.Variable:
    del session
    return tf1.get_variable("w", initializer=[1.0, 1.0])


def _original(update: Callable[[tf.Tensor], tf.Tensor], *, counts_first: bool) -> np.ndarray:
    """Return the weight, at first 1, after one step of a training that reads and increments the global step.

    The originals do not order the read and the increment, so either may come first. Here the order is forced.

    Args:
        update: A function from the value of the step that was read to the value to subtract from the weight.
        counts_first: Whether the increment comes before the read.
    """
    # TensorFlow's graph optimizer may drop control dependencies between reads and writes of reference variables.
    config = tf1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default(), tf1.Session(config=config) as session:
        global_step, weight = tf1.train.get_or_create_global_step(), tf1.get_variable("w", initializer=[1.0])
        if counts_first:
            counted = global_step.assign_add(1)
            with tf.control_dependencies([counted]):
                step = tf.cast(global_step.read_value(), tf.float32)
        else:
            step = tf.cast(global_step.read_value(), tf.float32)
            with tf.control_dependencies([step]):
                counted = global_step.assign_add(1)
        train_op = tf.group(weight.assign_sub(update(step) * tf.ones(1)), counted)
        session.run(tf1.global_variables_initializer())
        session.run(train_op)
        return session.run(weight)


def _late(value: tf.Tensor) -> tf.Tensor:
    """Return a value that is computed long after everything in the same run that does not wait for it."""
    return tf.numpy_function(lambda value: time.sleep(0.2) or value, [value], value.dtype)


@pytest.mark.parametrize("counts_first", [True, False])
def test_lamb_corrects_its_first_update_by_step_1_and_not_0(counts_first: bool, session: tf1.Session) -> None:
    def update(step: tf.Tensor) -> tf.Tensor:
        first, second = 0.1 / (1 - 0.9**step), 0.001 / (1 - 0.999**step)
        return 0.25 * first / (tf.sqrt(second) + 1e-6)

    original = _original(update, counts_first=counts_first)
    np.testing.assert_allclose(original, 0.75 if counts_first else np.nan, rtol=1e-4)
    ours, global_step = tf1.get_variable("ours", initializer=[1.0]), tf1.train.get_or_create_global_step()
    # Without an order, the counter would be incremented before the late gradient is computed.
    grad = tf.ensure_shape(_late(tf.ones(1)), [1]) if counts_first else tf.ones(1)
    train_op = bert.LAMBOptimizer(0.25).apply_gradients([(grad, ours)], global_step)
    session.run(tf1.global_variables_initializer())
    session.run(train_op)
    np.testing.assert_allclose(session.run(ours), 0.75, rtol=1e-4)


def test_the_rate_is_read_before_the_step_is_counted(session: tf1.Session) -> None:
    # Depending on the order, step 0 gets its own rate, or the rate of the next step.
    assert [_original(lambda step: step, counts_first=first).tolist() for first in (False, True)] == [[1.0], [0.0]]
    global_step, ours = tf1.train.get_or_create_global_step(), tf1.get_variable("ours", initializer=[1.0])
    with tf.control_dependencies([_late(tf.constant(0.0))]):
        rate = tf.cast(global_step.read_value(), tf.float32)
    train_op = bert.AdamWeightDecayOptimizer(rate).apply_gradients([(tf.ones(1), ours)], global_step)
    session.run(tf1.global_variables_initializer())
    session.run(train_op)
    assert session.run([ours, global_step]) == [1.0, 1]


def test_a_stock_optimizer_counts_each_step_once(session: tf1.Session) -> None:
    w, global_step = _ones(session), tf1.train.get_or_create_global_step()
    loss = tf.reduce_sum(w)

    def assign_after(train_op: tf.Operation) -> tf.Operation:
        with tf.control_dependencies([train_op]):
            return tf.group(global_step.assign(global_step.read_value() + 1))

    counted_twice = assign_after(tf1.train.GradientDescentOptimizer(0.5).minimize(loss, global_step))
    wrapped = tfmp.LossScaleOptimizer(bert.AdamWeightDecayOptimizer(0.5), tfmp.FixedLossScaleManager(8))
    counted_once = wrapped.minimize(loss, global_step)
    session.run(tf1.global_variables_initializer())
    for _ in range(10):
        session.run(counted_twice)
    assert session.run(global_step) == 20
    for _ in range(10):
        session.run(counted_once)
    assert session.run(global_step) == 30


def test_a_skipped_step_is_not_counted(session: tf1.Session) -> None:
    w, grad = _ones(session), tf1.placeholder(tf.float32, [2])
    theirs = tf1.get_variable("theirs", initializer=0)
    inner = tf1.train.GradientDescentOptimizer(0.25)
    optimizer = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(8))
    # The end of Google's function: the optimizer does not get the global step, and the script assigns it.
    applied = optimizer.minimize(tf.reduce_sum(w * grad))
    racing = tf.group(applied, theirs.assign(theirs.read_value() + 1))
    model = kit_models.Model(manual_fp16=True)
    session.run(tf1.global_variables_initializer())
    (grads,) = kit_models.random_grads(1)
    for value, each in ((1.0, grads), (np.inf, kit_models.overflowing(grads)), (1.0, grads)):
        session.run(racing, {grad: [value, 1.0]})
        model.run(session, each)
    # Two steps changed the weight, but three were counted.
    assert session.run(w).tolist() == [0.5, 0.5]
    assert session.run([theirs, tf1.train.get_global_step()]) == [3, 2]


def test_an_infinity_destroys_no_weight_in_float32(session: tf1.Session) -> None:
    infinite = kit_models.overflowing(kit_models.random_grads(1)[0])
    # This is Google's step, and NVIDIA's without a float16 mode: the norm is computed even if gradients are not finite.
    theirs = [tf1.get_variable(f"theirs/{name}", initializer=value) for name, value in kit_models.START.items()]
    clipped, _ = tf.clip_by_global_norm([tf.constant(each) for each in infinite], clip_norm=1.0)
    their_op = tf.group(*(each.assign_sub(0.125 * grad) for each, grad in zip(theirs, clipped, strict=True)))
    with tf.Graph().as_default(), tf1.Session() as ours:
        model = kit_models.Model()
        ours.run(tf1.global_variables_initializer())
        model.run(ours, infinite)
        for name, value in kit_models.START.items():
            np.testing.assert_array_equal(ours.run(model.variables[name]), value)
    session.run(tf1.global_variables_initializer())
    session.run(their_op)
    assert all(np.isnan(value).all() for value in session.run(theirs))


@pytest.mark.parametrize("warmup", [10, 20])
def test_a_warm_up_as_long_as_the_training_divides_by_nothing(warmup: int, session: tf1.Session) -> None:
    model = kit_models.Model(num_train_steps=10, num_warmup_steps=warmup)
    session.run(tf1.global_variables_initializer())
    (grads,) = kit_models.random_grads(1)
    rates = [model.run(session, grads, "learning_rate:0")[0] for _ in range(3)]
    assert rates == pytest.approx([0.0, 0.125 / warmup, 0.25 / warmup])


def test_the_shadow_of_a_float16_weight_is_written_back(session: tf1.Session) -> None:
    theirs = tf1.get_variable("theirs", initializer=tf.constant([1.0], tf.float16))
    copy = tf1.get_variable("copy", initializer=[1.0])
    next_value = copy.read_value() - 0.5
    theirs.assign(tf.cast(next_value, tf.float16))  # no op of the training depends on it, so it never runs
    their_op = tf.group(copy.assign(next_value))
    ours = tf1.get_variable("ours", initializer=tf.constant([1.0], tf.float16))
    our_op = bert.AdamWeightDecayOptimizer(0.5, weight_decay_rate=1.0).apply_gradients([(tf.zeros([1]), ours)])
    session.run(tf1.global_variables_initializer())
    session.run([their_op, our_op])
    assert session.run([theirs, copy, ours]) == [1.0, 0.5, 0.5]


def test_many_skipped_steps_make_no_negative_rate() -> None:
    steps, batch, near_checkpoint, seconds, first_of_interval = 10, 32, 0, 0.0, 6
    throughput = bert.Throughput(batch, steps_per_checkpoint=100)
    global_step = 0
    while global_step < steps:
        # Of every three runs, two are skipped.
        for applied in (False, False, True):
            global_step += applied
            throughput.add(0.5, global_step)
            if global_step % 100 < first_of_interval:
                near_checkpoint += 1
            else:
                seconds += 0.5
    assert (steps - near_checkpoint) * batch / seconds < 0
    assert throughput.attempted == 64.0
    assert throughput.applied == pytest.approx(64.0 / 3)
