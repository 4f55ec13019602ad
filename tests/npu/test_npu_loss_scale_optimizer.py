"""The optimizer of the NPU bridge trains as tfmp's does, with or without the overflow check."""

import copy
import math

import pytest
import tensorflow as tf

import tfmp
import tfmp.npu
from tfmp.npu import npu_loss_scale_manager as lsm_lib
from tfmp.npu import npu_loss_scale_optimizer as lso

pytestmark = pytest.mark.graph


class Problem:
    """Weights whose gradients are the fed number."""

    def __init__(self) -> None:
        self.w = tf.compat.v1.get_variable("w", initializer=tf.constant([1.0, 2.0]))
        self.factor = tf.compat.v1.placeholder(tf.float32, [])
        self.loss = tf.reduce_sum(self.w) * self.factor
        self.global_step = tf.compat.v1.train.get_or_create_global_step()

    def train(self, session: tf.compat.v1.Session, train_op: tf.Operation, factors: list[float]) -> list[float]:
        """Take a step for each factor; return the scale after each."""
        session.run(tf.compat.v1.global_variables_initializer())
        scales = []
        for factor in factors:
            session.run(train_op, {self.factor: factor})
            scales.append(float(session.run("loss_scale:0")))
        return scales


def _sgd() -> tf.compat.v1.train.Optimizer:
    return tf.compat.v1.train.GradientDescentOptimizer(0.5)


# The code of public scripts. The imports above are theirs too, with tfmp.npu in place of the bridge's package.
def test_script_trains_as_tf_contrib_did(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    manager = lsm_lib.ExponentialUpdateLossScaleManager(
        init_loss_scale=8, incr_every_n_steps=2, decr_every_n_nan_or_inf=2, decr_ratio=0.5
    )
    optimizer = lso.NPULossScaleOptimizer(_sgd(), manager, is_distributed=False)
    grads_and_vars = optimizer.compute_gradients(problem.loss, [problem.w])
    train_op = optimizer.apply_gradients(grads_and_vars, global_step=problem.global_step)
    scales = problem.train(session, train_op, [1.0, 1.0, math.inf, math.nan, 1.0, 1.0])
    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]
    assert session.run(problem.w).tolist() == [-1.0, 0.0]
    assert session.run([problem.global_step, optimizer.applied_steps, optimizer.skipped_steps]) == [4, 4, 2]


def test_two_wrapped_optimizers_have_a_scale_each(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    other = tf.compat.v1.get_variable("other", initializer=1.0)
    losses = {problem.w: problem.loss, other: other * 1.0}
    ops = []
    for variable, loss in losses.items():
        manager = lsm_lib.ExponentialUpdateLossScaleManager(8, 1000, 1, 2, 0.5)
        ops.append(lso.NPULossScaleOptimizer(_sgd(), manager).minimize(loss, var_list=[variable]))
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(ops, {problem.factor: math.inf})
    assert session.run(["loss_scale:0", "loss_scale_1:0"]) == [4.0, 8.0]


def test_fixed_scale_skips_a_step_that_overflows(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    manager = lsm_lib.FixedLossScaleManager(loss_scale=1024)
    assert manager.get_enable_overflow_check()
    optimizer = lso.NPULossScaleOptimizer(_sgd(), manager)
    train_op = optimizer.minimize(problem.loss, problem.global_step)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(train_op, {problem.factor: math.inf})
    assert session.run(problem.w).tolist() == [1.0, 2.0]
    assert session.run([problem.global_step, optimizer.skipped_steps]) == [0, 1]


def test_without_overflow_check_an_infinite_gradient_is_applied(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    manager = lsm_lib.FixedLossScaleManager(loss_scale=1024, enable_overflow_check=False)
    assert not manager.get_enable_overflow_check()
    optimizer = lso.NPULossScaleOptimizer(_sgd(), manager)
    train_op = optimizer.minimize(problem.loss, problem.global_step)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(train_op, {problem.factor: 1.0})
    assert session.run(problem.w).tolist() == [0.5, 1.5]
    session.run(train_op, {problem.factor: math.inf})
    assert session.run(problem.w).tolist() == [-math.inf, -math.inf]
    watched = [problem.global_step, optimizer.applied_steps, optimizer.skipped_steps, manager.get_loss_scale()]
    assert session.run(watched) == [2, 2, 0, 1024.0]


def test_other_optimizers_check_in_any_case(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    manager = lsm_lib.FixedLossScaleManager(1024, enable_overflow_check=False)
    train_op = tfmp.LossScaleOptimizer(_sgd(), manager).minimize(problem.loss)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(train_op, {problem.factor: math.inf})
    assert session.run(problem.w).tolist() == [1.0, 2.0]


def test_bad_optimizers_are_refused() -> None:
    with tf.Graph().as_default():
        manager = tfmp.npu.FixedLossScaleManager(8)
        with pytest.raises(TypeError, match=r"loss_scale_manager must be a tfmp\.LossScaleManager, got 8"):
            tfmp.npu.NPULossScaleOptimizer(_sgd(), 8)
        with pytest.raises(TypeError, match=r"opt must be a tf\.compat\.v1\.train\.Optimizer, got 'adam'"):
            tfmp.npu.NPULossScaleOptimizer("adam", manager)


def test_wrapping_twice_is_refused() -> None:
    with tf.Graph().as_default():
        manager = tfmp.npu.FixedLossScaleManager(8)
        wrapped = tfmp.npu.NPULossScaleOptimizer(_sgd(), manager)
        with pytest.raises(ValueError, match="wrapping it again would scale the loss twice"):
            tfmp.npu.NPULossScaleOptimizer(wrapped, manager)


def test_sparse_gradients_are_made_dense_on_request() -> None:
    with tf.Graph().as_default():
        w = Problem().w
        for dense in (False, True):
            manager = lsm_lib.FixedLossScaleManager(8)
            optimizer = lso.NPULossScaleOptimizer(_sgd(), manager, sparse_as_dense=dense)
            ((grad, _),) = optimizer.compute_gradients(tf.reduce_sum(tf.gather(w, [1])), [w])
            assert isinstance(grad, tf.IndexedSlices) is not dense


def test_is_distributed_needs_something_that_distributes(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    optimizer = lso.NPULossScaleOptimizer(_sgd(), lsm_lib.FixedLossScaleManager(8), is_distributed=True)
    with pytest.raises(ValueError, match=r"is_distributed=True, and nothing distributes: call hvd\.init\(\)"):
        optimizer.minimize(problem.loss)


class Noted(tf.compat.v1.train.GradientDescentOptimizer):
    """An optimizer with an additional attribute."""

    schedule = "linear"


def test_unknown_attributes_are_those_of_the_wrapped_optimizer() -> None:
    with tf.Graph().as_default():
        optimizer = lso.NPULossScaleOptimizer(Noted(0.5), lsm_lib.FixedLossScaleManager(8))
    assert isinstance(optimizer, tfmp.LossScaleOptimizer)
    assert (optimizer.schedule, optimizer._learning_rate, optimizer.get_name()) == ("linear", 0.5, "GradientDescent")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = optimizer.no_such_name


def test_copies_and_unfinished_objects_do_not_ask_for_ever() -> None:
    with tf.Graph().as_default():
        optimizer = lso.NPULossScaleOptimizer(Noted(0.5), lsm_lib.FixedLossScaleManager(8))
        assert copy.copy(optimizer)._opt is optimizer._opt
    unfinished = lso.NPULossScaleOptimizer.__new__(lso.NPULossScaleOptimizer)
    with pytest.raises(AttributeError, match="'NPULossScaleOptimizer' object has no attribute 'schedule'"):
        _ = unfinished.schedule


def test_checkpoint_does_not_take_it_for_the_wrapped_optimizer(session: tf.compat.v1.Session) -> None:
    inner = _sgd()
    tf.train.Checkpoint(optimizer=inner)
    optimizer = lso.NPULossScaleOptimizer(inner, lsm_lib.FixedLossScaleManager(8))
    with session.as_default(), pytest.raises(NotImplementedError, match=r"a tf\.train\.Checkpoint cannot hold this"):
        tf.train.Checkpoint(optimizer=optimizer).save("unused")
