"""The wrapper around TF1 optimizers, in graph mode."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = [pytest.mark.graph]

_INNER: dict[str, Callable[[], tf.compat.v1.train.Optimizer]] = {
    "gd": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.5, 0.5),
    "adam": lambda: tf.compat.v1.train.AdamOptimizer(0.5),
    "rmsprop": lambda: tf.compat.v1.train.RMSPropOptimizer(0.5),
    "adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(0.5),
    "ftrl": lambda: tf.compat.v1.train.FtrlOptimizer(0.5),
}


def _exponential(**settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(
        **{"init_loss_scale": 1024, "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
        | settings
    )


class Problem:
    """A loss whose gradient is the vector that is fed to `factor`."""

    def __init__(self, dtype: tf.DType = tf.float32) -> None:
        self.w = tf.compat.v1.get_variable("w", initializer=tf.constant([1.0, 2.0], dtype))
        self.factor = tf.compat.v1.placeholder_with_default(np.float32([1.0, 1.0]), [2])
        self.loss = tf.reduce_sum(tf.cast(self.w, tf.float32) * self.factor)
        self.global_step = tf.compat.v1.train.get_or_create_global_step()


def _initialize(session: tf.compat.v1.Session) -> None:
    session.run(tf.compat.v1.global_variables_initializer())


def _values_except_state(session: tf.compat.v1.Session) -> dict[str, Any]:
    """Return the values of all variables except those of the loss scale's state."""
    state = ("loss_scale", "good_steps", "bad_steps")
    variables = [variable for variable in tf.compat.v1.global_variables() if not variable.name.startswith(state)]
    return {variable.name: session.run(variable).tolist() for variable in variables}


@pytest.mark.parametrize("make_inner", _INNER.values(), ids=_INNER)
def test_every_optimizer_trains_as_without_a_wrapper_and_skips_overflows(
    session: tf.compat.v1.Session, make_inner: Callable[[], tf.compat.v1.train.Optimizer]
) -> None:
    problem = Problem()
    plain = tf.compat.v1.get_variable("plain", initializer=[1.0, 2.0])
    wrapped_op = tfmp.LossScaleOptimizer(make_inner(), _exponential()).minimize(problem.loss, var_list=[problem.w])
    plain_op = make_inner().minimize(tf.reduce_sum(plain * problem.factor), var_list=[plain])
    _initialize(session)
    for step in range(5):
        before = _values_except_state(session)
        session.run(wrapped_op, {problem.factor: [0.0, (math.inf, -math.inf, math.nan)[step % 3]]})
        assert _values_except_state(session) == before
        session.run([wrapped_op, plain_op], {problem.factor: [step / 4, -1.0]})
    assert session.run(problem.w).tolist() == session.run(plain).tolist()


def test_nan_on_every_step_never_changes_the_weights(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), _exponential())
    train_op = opt.minimize(problem.loss * math.nan, problem.global_step)
    _initialize(session)
    before = _values_except_state(session)
    for _ in range(1000):
        session.run(train_op)
    assert _values_except_state(session) == before
    assert session.run([opt.loss_scale, opt.skipped_steps, opt.applied_steps]) == [1, 1000, 0]


def test_compute_gradients_returns_unscaled_float32(session: tf.compat.v1.Session) -> None:
    problem = Problem(tf.float16)
    # tf.contrib unscaled in float16, where the reciprocal of 2**25 is 0.
    opt = tfmp.LossScaleOptimizer(_INNER["gd"](), tfmp.FixedLossScaleManager(2**25))
    ((grad, variable),) = opt.compute_gradients(problem.loss, [problem.w])
    assert grad.dtype == tf.float32
    assert variable is problem.w
    train_op = opt.apply_gradients([(grad, variable)])
    _initialize(session)
    feeds = {problem.factor: [2.0**-12, -(2.0**-13)]}
    assert session.run(grad, feeds).tolist() == [2.0**-12, -(2.0**-13)]
    session.run(train_op, {problem.factor: [2.0**-10, 0.0]})
    assert session.run(problem.w).tolist() == [1 - 2.0**-11, 2.0]


def test_float16_loss_is_scaled_in_float32(session: tf.compat.v1.Session) -> None:
    losses = []

    class Recording(tf.compat.v1.train.GradientDescentOptimizer):
        def compute_gradients(self, loss: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
            losses.append(loss)
            return super().compute_gradients(loss, *args, **kwargs)

    problem = Problem()
    opt = tfmp.LossScaleOptimizer(Recording(0.5), tfmp.FixedLossScaleManager(2**17))
    opt.compute_gradients(tf.cast(problem.loss, tf.float16), [problem.w])
    _initialize(session)
    # 2**17 is infinite in float16, the type in which tf.contrib multiplied the loss.
    assert session.run(losses[0]) == 3 * 2**17


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_variables_of_every_float_type_are_trained(session: tf.compat.v1.Session, dtype: tf.DType) -> None:
    problem = Problem(dtype)
    train_op = tfmp.LossScaleOptimizer(_INNER["gd"](), _exponential()).minimize(problem.loss)
    _initialize(session)
    session.run(train_op)
    assert session.run(problem.w).astype(float).tolist() == [0.5, 1.5]


def test_variable_that_the_loss_does_not_use_does_not_change(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    other = tf.compat.v1.get_variable("other", initializer=[5.0])
    opt = tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential())
    grads_and_vars = opt.compute_gradients(problem.loss, [other, problem.w])
    assert grads_and_vars[0][0] is None
    train_op = opt.apply_gradients(grads_and_vars)
    minimize_op = opt.minimize(problem.loss)
    _initialize(session)
    session.run([train_op, minimize_op])
    assert session.run(other).tolist() == [5]
    assert session.run(problem.w).tolist() != [1, 2]


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_stay_sparse_unless_asked(session: tf.compat.v1.Session, sparse_as_dense: bool) -> None:
    table = tf.compat.v1.get_variable("table", initializer=np.ones([3, 1], np.float32))
    row = tf.compat.v1.placeholder(tf.int32, [])
    opt = tfmp.LossScaleOptimizer(_INNER["momentum"](), _exponential(), sparse_as_dense=sparse_as_dense)
    grads_and_vars = opt.compute_gradients(tf.reduce_sum(tf.gather(table, [row])), [table])
    assert isinstance(grads_and_vars[0][0], tf.IndexedSlices) is not sparse_as_dense
    train_op = opt.apply_gradients(grads_and_vars)
    _initialize(session)
    session.run(train_op, {row: 0})
    session.run(train_op, {row: 1})
    # The second step looks up row 1 only. With a dense gradient Momentum still changes row 0; with a sparse one it
    # does not.
    assert session.run(table).ravel().tolist() == ([0.25, 0.5, 1] if sparse_as_dense else [0.5, 0.5, 1])


class _CountsForItself(tf.compat.v1.train.GradientDescentOptimizer):
    """Advances the global step itself, as the AdamWeightDecayOptimizer of some BERTs does."""


class _DoesNotCount(tf.compat.v1.train.GradientDescentOptimizer):
    """Ignores the global step, as the optimizer of google-research/bert does."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> tf.Operation:
        del global_step
        return super().apply_gradients(grads_and_vars, name=name)


@pytest.mark.parametrize("inner", [_CountsForItself, _DoesNotCount])
def test_global_step_counts_applied_steps_once(
    session: tf.compat.v1.Session, inner: type[tf.compat.v1.train.Optimizer]
) -> None:
    problem = Problem()
    train_op = tfmp.LossScaleOptimizer(inner(0.5), _exponential()).minimize(problem.loss, problem.global_step)
    _initialize(session)
    seen = []
    for factor in (1.0, math.inf, 1.0, math.nan, 1.0):
        session.run(train_op, {problem.factor: [factor, 1.0]})
        seen.append(int(session.run(problem.global_step)))
    assert seen == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("with_global_step", [False, True])
def test_inner_optimizer_may_return_a_list(session: tf.compat.v1.Session, with_global_step: bool) -> None:
    class Lists(tf.compat.v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
            return [super(Lists, self).apply_gradients([pair], name=name) for pair in grads_and_vars]

    problem = Problem()
    opt = tfmp.LossScaleOptimizer(Lists(0.5), _exponential())
    train_op = opt.minimize(problem.loss, problem.global_step if with_global_step else None)
    _initialize(session)
    session.run(train_op)
    assert session.run(problem.w).tolist() == [0.5, 1.5]
    assert session.run(problem.global_step) == with_global_step


def test_grad_loss_works_as_without_wrapper(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    opt = tfmp.LossScaleOptimizer(_INNER["gd"](), tfmp.FixedLossScaleManager(8))
    ((grad, _),) = opt.compute_gradients(problem.loss, [problem.w], grad_loss=tf.constant(3.0))
    _initialize(session)
    assert session.run(grad).tolist() == [3, 3]


def test_slots_and_names_are_those_of_the_wrapped_optimizer(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    inner = tf.compat.v1.train.MomentumOptimizer(0.5, 0.5, name="Mine")
    manager = _exponential()
    opt = tfmp.LossScaleOptimizer(inner, manager)
    opt.minimize(problem.loss)
    assert opt.get_name() == "Mine"
    assert opt.get_slot_names() == ["momentum"]
    assert opt.get_slot(problem.w, "momentum") is inner.get_slot(problem.w, "momentum")
    assert opt.get_slot(problem.w, "momentum") is not None
    assert opt.variables() == inner.variables()
    assert (opt._opt, opt._loss_scale_manager) == (inner, manager)


@pytest.mark.parametrize("made_inside", [False, True], ids=["made-before", "made-inside"])
def test_update_ops_run_before_the_step(session: tf.compat.v1.Session, made_inside: bool) -> None:
    problem = Problem()
    moving = tf.compat.v1.get_variable("moving", initializer=0.0, trainable=False)
    needs_feed = tf.compat.v1.assign_add(moving, problem.factor[0])

    def make() -> tfmp.LossScaleOptimizer:
        return tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential())

    opt = None if made_inside else make()
    with tf.control_dependencies([needs_feed]):
        opt = opt or make()
        train_op = opt.minimize(problem.loss, problem.global_step)
    _initialize(session)
    session.run(train_op)
    session.run(train_op, {problem.factor: [math.inf, 1.0]})
    assert session.run([problem.global_step, opt.loss_scale, moving]) == [1, 512, math.inf]


@pytest.mark.parametrize("scope", [tf.compat.v1.variable_scope, tf.name_scope])
@pytest.mark.parametrize("made_inside", [False, True], ids=["made-before", "made-inside"])
def test_training_is_the_same_inside_a_scope(session: tf.compat.v1.Session, scope: type, made_inside: bool) -> None:
    problem = Problem()
    opt = None if made_inside else tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential())
    with scope("training"):
        opt = opt or tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential())
        train_op = opt.minimize(problem.loss, problem.global_step)
    _initialize(session)
    session.run(train_op)
    session.run(train_op, {problem.factor: [math.inf, 1.0]})
    assert session.run([problem.global_step, opt.loss_scale]) == [1, 512]
    assert session.run("training/loss_scale:0" if made_inside else "loss_scale:0") == 512


@pytest.mark.parametrize("made_inside", [False, True], ids=["made-before", "made-inside"])
def test_step_can_be_inside_a_conditional_of_the_script(session: tf.compat.v1.Session, made_inside: bool) -> None:
    problem = Problem()
    ready = tf.compat.v1.placeholder_with_default(True, [])

    def make() -> tfmp.LossScaleOptimizer:
        return tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential())

    made = [] if made_inside else [make()]
    grads_and_vars = None if made_inside else made[0].compute_gradients(problem.loss, [problem.w])

    def update() -> tf.Operation:
        if made_inside:
            made.append(make())
        pairs = grads_and_vars or [(tf.identity(problem.factor), problem.w)]
        return made[0].apply_gradients(pairs, problem.global_step)

    train_op = tf.cond(ready, update, tf.no_op)
    _initialize(session)
    watched = [problem.global_step, made[0].loss_scale, made[0].skipped_steps]
    session.run(train_op)
    session.run(train_op, {ready: False})
    session.run(train_op, {problem.factor: [math.inf, 1.0]})
    assert session.run(watched) == [1, 512, 1]


def test_two_optimizers_of_a_gan_keep_separate_states(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    other = tf.compat.v1.get_variable("other", initializer=1.0)
    opts = [tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential()) for _ in range(2)]
    losses = [problem.loss, other * problem.factor[0]]
    ops = [opt.minimize(loss) for opt, loss in zip(opts, losses, strict=True)]
    # Checkpoints of GANs that were trained with tf.contrib have these names.
    names = {variable.op.name for variable in tf.compat.v1.global_variables()}
    assert {"cond/beta1_power", "cond_2/beta1_power", "w/Adam", "other/Adam"} <= names
    _initialize(session)
    session.run(ops[0])
    session.run(ops[1], {problem.factor: [math.inf, 1.0]})
    assert session.run([opts[0].loss_scale, opts[1].loss_scale]) == [1024, 512]


def test_missing_gradients_are_refused(session: tf.compat.v1.Session) -> None:
    opt = tfmp.LossScaleOptimizer(_INNER["gd"](), _exponential())
    with pytest.raises(ValueError, match="grads_and_vars is empty"):
        opt.apply_gradients([])
    with pytest.raises(ValueError, match="every gradient is None: the loss depends on none of the variables w:0"):
        opt.apply_gradients([(None, Problem().w)])


def test_refused_step_adds_nothing_to_the_graph(session: tf.compat.v1.Session) -> None:
    problem = Problem()
    opt = tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential(), is_distributed=True)
    before = len(tf.compat.v1.global_variables())
    with pytest.raises(ValueError, match="is_distributed=True"):
        opt.apply_gradients([(problem.factor, problem.w)])
    assert len(tf.compat.v1.global_variables()) == before


@pytest.mark.parametrize("bad", [3, "global_step"])
def test_global_step_that_is_not_a_variable_is_refused(session: tf.compat.v1.Session, bad: Any) -> None:
    problem = Problem()
    opt = tfmp.LossScaleOptimizer(_INNER["adam"](), _exponential())
    with pytest.raises(TypeError, match=f"global_step must be a variable, got {bad!r}: pass tf"):
        opt.minimize(problem.loss, bad)


def test_integer_loss_is_refused(session: tf.compat.v1.Session) -> None:
    opt = tfmp.LossScaleOptimizer(_INNER["gd"](), _exponential())
    with pytest.raises(TypeError, match="floating-point type, got int32"):
        opt.minimize(tf.constant(3))
