"""What goes wrong in the published scripts, each in its smallest form, and that it does not go wrong here.

What takes two processes to go wrong is in `test_kit_horovod.py`.
"""

import time
from typing import Any

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


def _read_after(op: Any, global_step: tf.Variable) -> tf.Tensor:
    """Return the global step, read when an op is done: where nothing orders the two, as a machine may do it."""
    with tf.control_dependencies([op]):
        return tf.cast(global_step.read_value() + 0, tf.float32)


def _sleep() -> tf.Operation:
    return tf.group(tf.numpy_function(lambda: time.sleep(0.2), [], []))


@pytest.mark.parametrize("read_late", [True, False])
def test_lamb_corrects_its_first_update_by_step_1_and_not_0(read_late: bool, session: tf1.Session) -> None:
    global_step = tf1.train.get_or_create_global_step()
    theirs, ours = (tf1.get_variable(name, initializer=[1.0, 1.0]) for name in ("theirs", "ours"))
    # Theirs: both orders are possible.
    read = tf.cast(global_step.read_value() + 0, tf.float32)
    with tf.control_dependencies([] if read_late else [read]):
        counted = global_step.assign_add(1)
    step = _read_after(counted, global_step) if read_late else read
    first, second = 0.1 / (1 - 0.9**step), 0.001 / (1 - 0.999**step)
    racing = tf.group(theirs.assign_sub(0.25 * first / (tf.sqrt(second) + 1e-6) * tf.ones(2)), counted)
    with tf.control_dependencies([_sleep()] if read_late else []):
        grad = tf.ones(2)
    ordered = bert.LAMBOptimizer(0.25).apply_gradients([(grad, ours)], global_step)
    initialize = tf1.global_variables_initializer()
    session.run(initialize)
    session.run(racing)
    assert np.isnan(session.run(theirs)).all() == (not read_late)
    session.run(initialize)
    session.run(ordered)
    np.testing.assert_allclose(session.run(ours), 0.75, rtol=1e-4)


def test_the_rate_is_read_before_the_step_is_counted(session: tf1.Session) -> None:
    global_step = tf1.train.get_or_create_global_step()
    theirs, ours = (tf1.get_variable(name, initializer=[1.0]) for name in ("theirs", "ours"))
    counted = global_step.assign_add(1)
    racing = tf.group(theirs.assign_sub(_read_after(counted, global_step) * tf.ones(1)), counted)
    rate = _read_after(_sleep(), global_step)
    ordered = bert.AdamWeightDecayOptimizer(rate).apply_gradients([(tf.ones(1), ours)], global_step)
    initialize = tf1.global_variables_initializer()
    session.run(initialize)
    session.run(racing)
    # The rate of step 0 is 0, and it is that of step 1 that was used.
    assert session.run(theirs) == 0.0
    session.run(initialize)
    session.run(ordered)
    assert session.run([ours, global_step]) == [1.0, 1]


def test_a_stock_optimizer_counts_each_step_once(session: tf1.Session) -> None:
    w, global_step = _ones(session), tf1.train.get_or_create_global_step()
    loss = tf.reduce_sum(w)

    def assign_after(train_op: tf.Operation) -> tf.Operation:
        with tf.control_dependencies([train_op]):
            return tf.group(global_step.assign(global_step.read_value() + 1))

    counted_twice = assign_after(tf1.train.GradientDescentOptimizer(0.5).minimize(loss, global_step))
    wrapped = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
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
    # Google's tail: the optimizer is not given the step, and the script assigns it.
    applied = optimizer.minimize(tf.reduce_sum(w * grad))
    racing = tf.group(applied, theirs.assign(theirs.read_value() + 1))
    model = kit_models.Model(manual_fp16=True)
    session.run(tf1.global_variables_initializer())
    (grads,) = kit_models.random_grads(1)
    for value, each in ((1.0, grads), (np.inf, kit_models.overflowing(grads)), (1.0, grads)):
        session.run(racing, {grad: [value, 1.0]})
        model.run(session, each)
    # Two steps moved the weight, and three were counted.
    assert session.run(w).tolist() == [0.5, 0.5]
    assert session.run([theirs, tf1.train.get_global_step()]) == [3, 2]


def test_an_infinity_destroys_no_weight_in_float32(session: tf1.Session) -> None:
    grads = [np.float32(3.0), np.float32(np.inf)]
    norm = np.sqrt(np.sum(np.square(grads)))
    with np.errstate(invalid="ignore"):
        assert np.isnan(grads[1] / norm)
    model = kit_models.Model()
    session.run(tf1.global_variables_initializer())
    model.run(session, kit_models.overflowing(kit_models.random_grads(1)[0]))
    for name, value in kit_models.START.items():
        np.testing.assert_array_equal(session.run(model.variables[name]), value)


@pytest.mark.parametrize("warmup", [10, 20])
def test_a_warm_up_as_long_as_the_training_divides_by_nothing(warmup: int, session: tf1.Session) -> None:
    with pytest.raises(ZeroDivisionError):
        _ = 0.5 * (0.5 / (0.5 * (1.0 - 10 / 10)))
    model = kit_models.Model(num_train_steps=10, num_warmup_steps=warmup)
    session.run(tf1.global_variables_initializer())
    (grads,) = kit_models.random_grads(1)
    rates = [model.run(session, grads, "learning_rate:0")[0] for _ in range(3)]
    assert rates == pytest.approx([0.0, 0.125 / warmup, 0.25 / warmup])


def test_the_shadow_of_a_float16_weight_is_written_back(session: tf1.Session) -> None:
    theirs = tf1.get_variable("theirs", initializer=tf.constant([1.0], tf.float16))
    copy = tf1.get_variable("copy", initializer=[1.0])
    next_value = copy.read_value() - 0.5
    theirs.assign(tf.cast(next_value, tf.float16))  # nothing runs it
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
        # Of three runs two are skipped.
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
