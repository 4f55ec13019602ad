"""A `GradScaler` in a graph of TensorFlow 1: what its ops run, and what is refused there."""

import math
from collections.abc import Callable
from typing import Any

import kerases
import pytest
import tensorflow as tf
from scaler_loops import sgd

import tfmp

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1

_ENABLED = pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])


def _weight() -> tf.Variable:
    return tf1.Variable(0.0, use_resource=True)


class _Loop:
    """A step of a weight whose gradient is fed, and whose global step counts; another weight steps beside it."""

    def __init__(self, scaler: tfmp.GradScaler) -> None:
        self.grad, self.weight, self.other = tf1.placeholder(tf.float32, []), _weight(), _weight()
        self.global_step, optimizer = tf1.train.get_or_create_global_step(), sgd()
        (grad,) = scaler.unscale(optimizer, [scaler.scale(self.grad)])
        self.step = scaler.step(optimizer, [(grad, self.weight)], global_step=self.global_step)
        scaler.step(sgd(), [(scaler.scale(tf.constant(1.0)), self.other)])


def test_steps_that_run_by_themselves_count_until_update_or_abandon_runs(session: tf1.Session) -> None:
    scaler = tfmp.GradScaler(1024)
    loop = _Loop(scaler)
    scale_up, give_up = scaler.update(new_scale=4096.0), scaler.abandon()
    session.run(tf1.global_variables_initializer())
    for grad in (math.inf, 1.0):
        session.run(loop.step, {loop.grad: grad})
    state = [loop.global_step, scaler.loss_scale, scaler.attempted_steps, scaler.skipped_steps]
    assert session.run(state) == [1, 1024, 0, 0]
    session.run(scale_up, {loop.grad: 1.0})
    assert session.run(state) == [2, 4096, 1, 1]
    # The scale is adjusted before the result is forgotten.
    session.run(loop.step, {loop.grad: math.nan})
    for _ in range(2):
        session.run(give_up)
        assert session.run(state) == [2, 2048, 2, 2]


@_ENABLED
def test_optimizer_of_the_user_may_return_a_tensor(session: tf1.Session, enabled: bool) -> None:
    class Own:
        def apply_gradients(self, grads_and_vars: Any) -> tf.Tensor:
            ((grad, variable),) = grads_and_vars
            return variable.assign_sub(grad, read_value=True)

    class Fused:
        def apply_scaled_gradients(self, grads_and_vars: Any, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation:
            ((grad, variable),) = grads_and_vars
            return variable.assign_sub(tf.where(finite, grad / loss_scale, 0.0)).op

    scaler, weights = tfmp.GradScaler(8, enabled=enabled), [_weight(), _weight()]
    for optimizer, weight in zip((Own(), Fused()), weights, strict=True):
        scaler.step(optimizer, [(scaler.scale(tf.constant(1.0)), weight)])
    update_op = scaler.update()
    session.run(tf1.global_variables_initializer())
    session.run(update_op)
    assert session.run(weights) == [-1, -1]


@_ENABLED
@pytest.mark.parametrize("steps", [True, False], ids=["stepped", "dropped"])
def test_window_is_emptied_whether_it_is_applied_or_dropped(session: tf1.Session, enabled: bool, steps: bool) -> None:
    scaler, weight, optimizer = tfmp.GradScaler(8, enabled=enabled), _weight(), sgd()
    accumulator, grad = tfmp.GradientAccumulator([weight], 2), tf1.placeholder(tf.float32, [])
    add = accumulator.add([scaler.scale(grad)], scaler.loss_scale)
    grads = scaler.unscale(optimizer, accumulator)
    if steps:
        scaler.step(optimizer, zip(grads, [weight], strict=True))
    update_op = scaler.update()
    session.run(tf1.global_variables_initializer())
    for grads_of_window, expected in [((1.0, 2.0), -1.5), ((1.0, math.inf), -1.5), ((3.0, 4.0), -5.0)]:
        for value in grads_of_window:
            session.run(add, {grad: value})
        session.run(update_op)
        assert session.run([weight, accumulator.tried]) == [expected * steps, 0]


def test_new_scale_that_is_fed_is_checked_when_it_runs(session: tf1.Session) -> None:
    scaler, new_scale = tfmp.GradScaler(8), tf1.placeholder(tf.float32, [])
    loop = _Loop(scaler)
    update_op, state = scaler.update(new_scale), [scaler.loss_scale, scaler.attempted_steps]
    session.run(tf1.global_variables_initializer())
    for bad in (math.nan, math.inf, 0.5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="the new loss scale is not within"):
            session.run(update_op, {new_scale: bad, loop.grad: 1.0})
        assert session.run(state) == [8, 0]
    session.run(update_op, {new_scale: 32.0, loop.grad: 1.0})
    assert session.run(state) == [32, 1]


def test_what_a_scaler_keeps_between_calls_are_no_variables_of_the_script(session: tf1.Session) -> None:
    scaler = tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(8))
    before = tf1.global_variables()
    scaler.unscale(sgd(), [tf.constant(1.0)])
    # So the script does not initialize them.
    session.run(scaler.update())
    assert tf1.global_variables() == before


def test_hook_reports_on_a_scaler(session: tf1.Session, caplog: pytest.LogCaptureFixture) -> None:
    scaler = tfmp.GradScaler(1024)
    loop = _Loop(scaler)
    update_op = scaler.update()
    hooks = [tfmp.LossScaleLoggingHook(manager, every_n_steps=10) for manager in (None, scaler)]
    with tf1.train.MonitoredSession(hooks=hooks) as monitored:
        for grad in (1.0, math.inf):
            monitored.run(update_op, {loop.grad: grad})
    reports = [record.message for record in caplog.records if record.message.startswith("loss scale")]
    # The norm is that of the last call of `step`, the other's; the report at the end comes too late to fetch one. With
    # control flow v2, the norm is in a conditional, whose tensors cannot be fetched.
    norm = "" if tf1.control_flow_v2_enabled() else ", gradient norm 1"
    assert sorted(set(reports)) == [
        f"loss scale 1024, global step 1, steps applied 1, skipped 0 (0 in a row){norm}",
        "loss scale 512, global step 1, steps applied 1, skipped 1 (1 in a row)",
    ]
    assert len(reports) == 4


def _in_conditional(call: Callable[[], Any]) -> Any:
    return tf.cond(tf1.placeholder(tf.bool, []), lambda: [call(), tf.constant(0.0)][1], lambda: tf.constant(0.0))


_NO_VALUE = "was called in a graph.*tf.compat.v1.train.Saver saves"
_REFUSED: dict[str, tuple[Callable[[tfmp.GradScaler], Any], type[Exception], str]] = {
    "step in a conditional": (
        lambda scaler: _in_conditional(lambda: scaler.step(sgd(), [(tf.constant(8.0), _weight())])),
        NotImplementedError,
        "step in a conditional.*build the step outside of it",
    ),
    "unscale in a conditional": (
        lambda scaler: _in_conditional(lambda: scaler.unscale(sgd(), [tf.constant(8.0)])),
        NotImplementedError,
        "unscale in a conditional.*build the unscale outside of it",
    ),
    "unscale in a function": (
        lambda scaler: tf.function(lambda: scaler.unscale(sgd(), [tf.constant(8.0)]))(),
        NotImplementedError,
        "unscale in a conditional, or in a tf.function, in a TF1 graph",
    ),
    **{
        name: (
            lambda scaler, keras=keras: scaler.step(keras.optimizers.SGD(1.0), [(tf.constant(8.0), _weight())]),
            NotImplementedError,
            "is Keras' SGD, which.*pass a tf.compat.v1.train.Optimizer",
        )
        for name, keras in kerases.installed().items()
    },
    "state_dict": (lambda scaler: scaler.state_dict(), RuntimeError, f"^state_dict {_NO_VALUE}"),
    "load_state_dict": (lambda scaler: scaler.load_state_dict({}), RuntimeError, f"^load_state_dict {_NO_VALUE}"),
    "replay": (
        lambda scaler: tfmp.replay(lambda: None, scaler, max_replays=2),
        RuntimeError,
        "while the optimizer's last_step_applied is False",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_a_graph_cannot_run_is_refused(session: tf1.Session, name: str) -> None:
    call, error, message = _REFUSED[name]
    scalers = [tfmp.GradScaler(8), *[tfmp.GradScaler(enabled=False)] * (name in kerases.installed())]
    for scaler in scalers:
        with pytest.raises(error, match=message):
            call(scaler)
