"""The wrapper around TF1 optimizers in graphs, beside what every host does alike."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

pytestmark = [pytest.mark.graph]

_INNER: dict[str, Callable[[], tf1.train.Optimizer]] = {
    "gd": lambda: tf1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.5, 0.5),
    "adam": lambda: tf1.train.AdamOptimizer(0.5),
    "rmsprop": lambda: tf1.train.RMSPropOptimizer(0.5),
    "adagrad": lambda: tf1.train.AdagradOptimizer(0.5),
    "ftrl": lambda: tf1.train.FtrlOptimizer(0.5),
}


def _wrap(inner: str | tf1.train.Optimizer = "gd", **settings: Any) -> tfmp.LossScaleOptimizer:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(_INNER[inner]() if isinstance(inner, str) else inner, manager, **settings)


def _fixed(scale: float) -> tfmp.LossScaleOptimizer:
    return tfmp.LossScaleOptimizer(_INNER["gd"](), tfmp.FixedLossScaleManager(scale))


class Problem:
    """A loss whose gradient is the vector that is fed to `factor`."""

    def __init__(self, session: tf1.Session, dtype: tf.DType = tf.float32) -> None:
        self._session = session
        self.w = tf1.get_variable("w", initializer=tf.constant([1.0, 2.0], dtype))
        self.factor = tf1.placeholder_with_default(np.float32([1.0, 1.0]), [2])
        self.loss = tf.reduce_sum(tf.cast(self.w, tf.float32) * self.factor)
        self.global_step = tf1.train.get_or_create_global_step()

    def run(self, op: Any, *factors: Any) -> Any:
        """Initialize all variables, and return what the op returns when it is run with each factor."""
        self._session.run(tf1.global_variables_initializer())
        return [self._session.run(op, {self.factor: factor}) for factor in factors]

    def weights(self) -> list[float]:
        """Return the values of the variable."""
        return self._session.run(self.w).astype(float).tolist()


@pytest.mark.parametrize("inner", _INNER)
def test_every_optimizer_trains_as_without_a_wrapper_and_skips_overflows(session: tf1.Session, inner: str) -> None:
    problem = Problem(session)
    plain = tf1.get_variable("plain", initializer=[1.0, 2.0])
    wrapped_op = _wrap(inner).minimize(problem.loss, var_list=[problem.w])
    plain_op = _INNER[inner]().minimize(tf.reduce_sum(plain * problem.factor), var_list=[plain])
    state = ("loss_scale", "good_steps", "bad_steps")
    moving = [variable for variable in tf1.global_variables() if not variable.name.startswith(state)]
    problem.run([])
    for step in range(5):
        before = [value.tolist() for value in session.run(moving)]
        session.run(wrapped_op, {problem.factor: [0.0, (math.inf, -math.inf, math.nan)[step % 3]]})
        assert [value.tolist() for value in session.run(moving)] == before
        session.run([wrapped_op, plain_op], {problem.factor: [step / 4, -1.0]})
    assert problem.weights() == session.run(plain).tolist()


def test_float16_loss_is_scaled_in_float32(session: tf1.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, given = tf1.train.GradientDescentOptimizer(0.5), list[tf.Tensor]()
    monkeypatch.setattr(inner, "compute_gradients", lambda loss, *_, **__: given.append(loss) or [])
    # 2**17 is infinite in float16, the type in which tf.contrib multiplied the loss.
    tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(2**17)).compute_gradients(tf.constant(3.0, tf.float16))
    assert session.run(given) == [3 * 2**17]


def test_compute_gradients_returns_unscaled_float32(session: tf1.Session) -> None:
    problem = Problem(session, tf.float16)
    # tf.contrib unscaled in float16, where the reciprocal of 2**25 is 0.
    opt = _fixed(2**25)
    ((grad, variable),) = opt.compute_gradients(problem.loss, [problem.w])
    assert (grad.dtype, variable is problem.w) == (tf.float32, True)
    train_op = opt.apply_gradients([(grad, variable)])
    assert problem.run(grad, [2.0**-12, -(2.0**-13)])[0].tolist() == [2.0**-12, -(2.0**-13)]
    ((grad, _),) = _fixed(8).compute_gradients(problem.loss, [problem.w], grad_loss=tf.constant(3.0))
    assert problem.run(grad, [1, 1])[0].tolist() == [3, 3]
    problem.run(train_op, [2.0**-10, 0.0])
    assert problem.weights() == [1 - 2.0**-11, 2.0]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_variables_of_every_float_type_are_trained(session: tf1.Session, dtype: tf.DType) -> None:
    problem = Problem(session, dtype)
    problem.run(_wrap().minimize(problem.loss), [1, 1])
    assert problem.weights() == [0.5, 1.5]


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_stay_sparse_unless_asked(session: tf1.Session, sparse_as_dense: bool) -> None:
    table = tf1.get_variable("table", initializer=np.ones([3, 1], np.float32))
    row = tf1.placeholder(tf.int32, [])
    opt = _wrap("momentum", sparse_as_dense=sparse_as_dense)
    grads_and_vars = opt.compute_gradients(tf.reduce_sum(tf.gather(table, [row])), [table])
    assert isinstance(grads_and_vars[0][0], tf.IndexedSlices) is not sparse_as_dense
    train_op = opt.apply_gradients(grads_and_vars)
    session.run(tf1.global_variables_initializer())
    for index in range(2):
        session.run(train_op, {row: index})
    # The second step looks up row 1 only. With a dense gradient Momentum still changes row 0; with a sparse one it
    # does not.
    assert session.run(table).ravel().tolist() == ([0.25, 0.5, 1] if sparse_as_dense else [0.5, 0.5, 1])


class _DoesNotCount(tf1.train.GradientDescentOptimizer):
    """Ignores the global step, as the optimizer of google-research/bert does."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> tf.Operation:
        del global_step
        return super().apply_gradients(grads_and_vars, name=name)


class _ReturnsLists(_DoesNotCount):
    """Returns a list of ops."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        return [super(_ReturnsLists, self).apply_gradients([pair], name=name) for pair in grads_and_vars]


@pytest.mark.parametrize("inner", [tf1.train.GradientDescentOptimizer, _DoesNotCount, _ReturnsLists])
def test_global_step_counts_applied_steps_once(session: tf1.Session, inner: type[tf1.train.Optimizer]) -> None:
    problem = Problem(session)
    train_op = _wrap(inner(0.5)).minimize(problem.loss, problem.global_step)
    for taken, counted in enumerate([1, 1, 2, 2, 3]):
        problem.run(train_op, *[(factor, 1.0) for factor in (1.0, math.inf, 1.0, math.nan, 1.0)][: taken + 1])
        assert session.run(problem.global_step) == counted
    assert problem.weights() == [1 - 1.5, 2 - 1.5]
    problem.run(_wrap(inner(0.5)).minimize(problem.loss), [1, 1])
    assert (problem.weights(), session.run(problem.global_step)) == ([0.5, 1.5], 0)


def test_callable_loss_works_in_a_graph(session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=1.0, use_resource=True)
    train_op = _wrap().minimize(lambda: w * 1.0)
    session.run(tf1.global_variables_initializer())
    session.run(train_op)
    assert session.run(w) == 0.5


def test_slots_and_names_are_those_of_the_wrapped_optimizer(session: tf1.Session) -> None:
    problem = Problem(session)
    inner = tf1.train.MomentumOptimizer(0.5, 0.5, name="Mine")
    opt = _wrap(inner)
    opt.minimize(problem.loss)
    assert (opt.get_name(), opt.get_slot_names()) == ("Mine", ["momentum"])
    assert opt.get_slot(problem.w, "momentum") is inner.get_slot(problem.w, "momentum") is not None
    assert opt.variables() == inner.variables()
    assert (opt._opt, opt._loss_scale_manager) == (inner, opt.manager)


@pytest.mark.parametrize("context", [tf1.variable_scope, tf.name_scope, "update ops"])
@pytest.mark.parametrize("made_inside", [False, True], ids=["made-before", "made-inside"])
def test_training_is_the_same_inside_a_scope_and_after_update_ops(
    session: tf1.Session, context: Any, made_inside: bool
) -> None:
    problem = Problem(session)
    moving = tf1.get_variable("moving", initializer=0.0, trainable=False)
    needs_feed = tf1.assign_add(moving, problem.factor[0])
    has_scope = context != "update ops"
    opt = None if made_inside else _wrap("adam")
    with context("training") if has_scope else tf.control_dependencies([needs_feed]):
        opt = opt or _wrap("adam")
        train_op = opt.minimize(problem.loss, problem.global_step)
    problem.run(train_op, [1.0, 1.0], [math.inf, 1.0])
    assert session.run([problem.global_step, opt.loss_scale, moving]) == [1, 512, 0 if has_scope else math.inf]
    assert session.run("training/loss_scale:0" if made_inside and has_scope else "loss_scale:0") == 512


@pytest.mark.parametrize("made_inside", [False, True], ids=["made-before", "made-inside"])
def test_step_can_be_inside_a_conditional_of_the_script(session: tf1.Session, made_inside: bool) -> None:
    problem, ready = Problem(session), tf1.placeholder_with_default(True, [])
    made = [] if made_inside else [_wrap("adam")]
    grads_and_vars = None if made_inside else made[0].compute_gradients(problem.loss, [problem.w])

    def update() -> tf.Operation:
        if made_inside:
            made.append(_wrap("adam"))
        pairs = grads_and_vars or [(tf.identity(problem.factor), problem.w)]
        return made[0].apply_gradients(pairs, problem.global_step)

    train_op = tf.cond(ready, update, tf.no_op)
    watched = [problem.global_step, made[0].loss_scale, made[0].skipped_steps]
    problem.run(train_op, [1.0, 1.0])
    session.run(train_op, {ready: False})
    session.run(train_op, {problem.factor: [math.inf, 1.0]})
    assert session.run(watched) == [1, 512, 1]


def test_refused_step_adds_nothing_to_the_graph(session: tf1.Session) -> None:
    problem = Problem(session)
    step, reference = (
        tf1.get_variable(name, initializer=value, trainable=False, use_resource=False)
        for name, value in (("step", 0), ("v", 1.0))
    )
    rows: list[tuple[Callable[[tfmp.LossScaleOptimizer], Any], str]] = [
        (lambda opt: opt.apply_gradients([]), "ValueError: .*grads_and_vars is empty"),
        (
            lambda opt: opt.apply_gradients([(None, problem.w)]),
            "ValueError: every gradient is None: the loss depends on none of the variables w:0",
        ),
        (lambda opt: opt.minimize(problem.loss, 3), "TypeError: global_step must be a variable, got 3: pass tf"),
        (lambda opt: opt.minimize(problem.loss, "global_step"), "TypeError: .* must be a variable, got 'global_step'"),
        (lambda opt: opt.minimize(tf.constant(3)), "TypeError: .*floating-point type, got int32"),
    ]
    if tf1.control_flow_v2_enabled():
        message = r"ValueError: {}:0 is a reference variable.*disable_v2_behavior\(\)"
        rows += [
            (lambda opt: opt.minimize(problem.loss, step), message.format("step")),
            (lambda opt: opt.minimize(reference * 1.0, var_list=[reference]), message.format("v")),
        ]
    distributed, *opts = _wrap("adam", is_distributed=True), *(_wrap("adam") for _ in rows)
    before = len(tf1.global_variables())
    for opt, (call, message) in zip(opts, rows, strict=True):
        with pytest.raises((TypeError, ValueError)) as refused:
            call(opt)
        assert re.match(message, f"{refused.type.__name__}: {refused.value}"), refused.value
    with pytest.raises(ValueError, match="is_distributed=True"):
        distributed.apply_gradients([(problem.factor, problem.w)])
    assert len(tf1.global_variables()) == before


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfmp"]


def _variable(use_resource: bool = True) -> tf.Variable:
    return tf1.get_variable("w", initializer=[1.0, 2.0], use_resource=use_resource)


# With control flow v2 only resource variables can be updated conditionally, so False is skipped there.
@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.usefixtures("session")
def test_script_that_calls_tf_gradients_is_warned_once_with_the_line(
    caplog: pytest.LogCaptureFixture, use_resource: bool
) -> None:
    if not use_resource and tf1.control_flow_v2_enabled():
        pytest.skip("control flow v2 cannot update a reference variable")
    w, opt = _variable(use_resource), _fixed(8)

    def gradients() -> list[tf.Tensor]:
        return tf.gradients(tf.reduce_sum(w), [w])

    for _ in range(2):
        grads, _ = tf.clip_by_global_norm(gradients(), 1.0)
        opt.apply_gradients(zip(grads, [w], strict=True))
    (warning,) = _warnings(caplog)
    assert warning.startswith(f"test_v1.py:{gradients.__code__.co_firstlineno + 1}: ")
    assert "grads_and_vars = opt.compute_gradients(loss, variables) in place of tf.gradients" in warning


def _minimized(opt: tfmp.LossScaleOptimizer, w: tf.Variable) -> None:
    opt.minimize(tf.reduce_sum(w))


def _clipped(opt: tfmp.LossScaleOptimizer, w: tf.Variable) -> None:
    ((grad, _),) = opt.compute_gradients(tf.reduce_sum(w), [w])
    opt.apply_gradients([(tf.clip_by_norm(grad, 1.0), w)])


def _applied_by_another_wrapper(opt: tfmp.LossScaleOptimizer, w: tf.Variable) -> None:
    opt.apply_gradients(_fixed(8).compute_gradients(tf.reduce_sum(w), [w]))


def _synchronized(opt: tfmp.LossScaleOptimizer, w: tf.Variable) -> None:
    synchronized = tf1.train.SyncReplicasOptimizer(opt, 1)
    synchronized.minimize(tf.reduce_sum(w), tf1.train.get_or_create_global_step())


def _by_hand(unscale: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., tf.Operation]:
    def apply(opt: tfmp.LossScaleOptimizer, w: tf.Variable) -> tf.Operation:
        scale = opt.manager.get_loss_scale()
        (grad,) = tf.gradients(tf.reduce_sum(w) * scale, [w])
        return opt.apply_gradients([(unscale(grad, scale), w)])

    return apply


_WAYS: dict[str, tuple[Callable[..., Any], int]] = {
    "minimize": (_minimized, 0),
    "clipped": (_clipped, 0),
    "another wrapper": (_applied_by_another_wrapper, 0),
    "synchronized": (_synchronized, 0),
    "divided by hand": (_by_hand(lambda grad, scale: grad / scale), 0),
    "multiplied and clipped": (
        _by_hand(lambda grad, scale: tf.clip_by_global_norm([grad * tf.cast(1.0 / scale, grad.dtype)], 10.0)[0][0]),
        0,
    ),
    "not divided": (_by_hand(lambda grad, scale: tf.clip_by_norm(grad, 1.0)), 1),
}


@pytest.mark.parametrize("make", [_fixed, lambda scale: _wrap()], ids=["fixed", "exponential"])
@pytest.mark.parametrize("way", _WAYS)
def test_only_a_script_that_does_not_unscale_is_warned_and_those_that_do_so_by_hand_train(
    session: tf1.Session, caplog: pytest.LogCaptureFixture, way: str, make: Any
) -> None:
    (apply, count), w = _WAYS[way], _variable()
    step = apply(make(8), w)
    assert len(_warnings(caplog)) == count
    if way in ("divided by hand", "multiplied and clipped"):
        session.run(tf1.global_variables_initializer())
        session.run(step)
        assert session.run(w).tolist() == [0.5, 1.5]
