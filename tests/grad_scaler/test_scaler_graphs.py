import math
from typing import Any

import kerases
import pytest
import tensorflow as tf

import tfmp

pytestmark = [pytest.mark.essential, pytest.mark.graph]

tf1 = tf.compat.v1


class _TwoNets:
    """Two losses with an optimizer each, in the current graph; the gradient of the first is clipped."""

    def __init__(self, scaler: tfmp.GradScaler) -> None:
        self.factor = tf1.placeholder(tf.float32, [])
        self.kernel = tf1.get_variable("kernel", initializer=[1.0, 2.0])
        self.bias = tf1.get_variable("bias", initializer=1.0)
        self.global_step = tf1.train.get_or_create_global_step()
        first, second = (tf1.train.MomentumOptimizer(0.5, 0.5) for _ in range(2))
        scaled = scaler.scale([tf.reduce_sum(self.kernel) * self.factor, self.bias * self.bias])
        (kernel_grad,) = scaler.unscale(first, tf1.gradients(scaled[0], [self.kernel]))
        bias_grads = tf1.gradients(scaled[1], [self.bias])
        clipped = tf.clip_by_value(kernel_grad, -8.0, 8.0)
        self.steps = [
            scaler.step(first, [(clipped, self.kernel)], global_step=self.global_step),
            scaler.step(second, zip(bias_grads, [self.bias], strict=True)),
        ]


def test_update_runs_the_whole_iteration(session: tf1.Session) -> None:
    scaler = tfmp.GradScaler(1024)
    nets = _TwoNets(scaler)
    update_op = scaler.update()
    counts = [scaler.applied_steps, scaler.skipped_steps, scaler.last_step_finite]
    session.run(tf1.global_variables_initializer())
    session.graph.finalize()
    states = []
    for factor in (1.0, math.inf, 2.0):
        session.run(update_op, {nets.factor: factor})
        kernel, *rest = session.run([nets.kernel, nets.bias, scaler.loss_scale, nets.global_step])
        states.append((kernel.tolist(), *rest))
    # The bias steps each time; the kernel and the global step change only if the kernel's gradient is finite.
    assert states == [([0.5, 1.5], 0, 1024, 1), ([0.5, 1.5], -0.5, 512, 1), ([-0.75, 0.25], -0.25, 512, 2)]
    assert session.run(counts) == [2, 1, True]


def test_steps_that_run_by_themselves_count_until_update_runs(session: tf1.Session) -> None:
    scaler = tfmp.GradScaler(1024)
    nets = _TwoNets(scaler)
    scale_up = scaler.update(new_scale=4096.0)
    session.run(tf1.global_variables_initializer())
    for factor in (math.inf, 1.0):
        session.run(nets.steps[0], {nets.factor: factor})
    assert session.run([nets.global_step, scaler.loss_scale, scaler.attempted_steps]) == [1, 1024, 0]
    session.run(scale_up, {nets.factor: 1.0})
    assert session.run([nets.global_step, scaler.loss_scale, scaler.skipped_steps]) == [2, 4096, 1]


def test_update_that_is_built_before_the_steps_is_refused(session: tf1.Session) -> None:
    scaler = tfmp.GradScaler(1024)
    with pytest.raises(RuntimeError, match="update was built before any step: build the steps first"):
        scaler.update()
    _TwoNets(scaler)
    scaler.update()
    with pytest.raises(RuntimeError, match="update was built before any step"):
        scaler.update()


def test_step_in_a_conditional_is_refused(session: tf1.Session) -> None:
    scaler, weight = tfmp.GradScaler(8), tf1.get_variable("w", initializer=0.0, use_resource=True)
    optimizer = tf1.train.GradientDescentOptimizer(1.0)

    def step() -> tf.Tensor:
        with tf.control_dependencies([scaler.step(optimizer, [(tf.constant(8.0), weight)])]):
            return tf.constant(True)

    with pytest.raises(NotImplementedError, match=r"step in a conditional.*build the step outside of it"):
        tf.cond(tf1.placeholder(tf.bool, []), step, lambda: tf.constant(False))


@pytest.mark.parametrize("keras", [pytest.param(keras, id=name) for name, keras in kerases.installed().items()])
def test_optimizer_of_keras_is_refused(session: tf1.Session, keras: Any) -> None:
    weight = tf1.get_variable("w", initializer=0.0, use_resource=True)
    for enabled in (True, False):
        with pytest.raises(NotImplementedError, match=r"is Keras' SGD, which.*pass a tf.compat.v1.train.Optimizer"):
            tfmp.GradScaler(8, enabled=enabled).step(keras.optimizers.SGD(1.0), [(tf.constant(8.0), weight)])


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_optimizer_of_the_user_may_return_a_tensor(session: tf1.Session, enabled: bool) -> None:
    class Own:
        def apply_gradients(self, grads_and_vars: Any) -> tf.Tensor:
            ((grad, variable),) = grads_and_vars
            return variable.assign_sub(grad, read_value=True)

    scaler, weight = tfmp.GradScaler(8, enabled=enabled), tf1.get_variable("w", initializer=0.0, use_resource=True)
    scaler.step(Own(), [(scaler.scale(tf.constant(1.0)), weight)])
    update_op = scaler.update()
    session.run(tf1.global_variables_initializer())
    session.run(update_op)
    assert session.run(weight) == -1


def test_new_scale_that_is_fed_is_checked_when_it_runs(session: tf1.Session) -> None:
    scaler = tfmp.GradScaler(8)
    new_scale = tf1.placeholder(tf.float32, [])
    update_op = scaler.update(new_scale)
    session.run(tf1.global_variables_initializer())
    for bad in (math.nan, math.inf, 0.5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="the new loss scale is not within"):
            session.run(update_op, {new_scale: bad})
    session.run(update_op, {new_scale: 32.0})
    assert session.run(scaler.loss_scale) == 32


def test_same_graph_trains_without_scaling(session: tf1.Session) -> None:
    scaler = tfmp.GradScaler(enabled=False)
    nets = _TwoNets(scaler)
    update_op = scaler.update()
    session.run(tf1.global_variables_initializer())
    session.run(update_op, {nets.factor: 1.0})
    kernel, *rest = session.run([nets.kernel, nets.bias, scaler.loss_scale, scaler.attempted_steps])
    assert (kernel.tolist(), *rest) == ([0.5, 1.5], 0, 1, 0)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_accumulator_is_emptied_by_the_step(session: tf1.Session, enabled: bool) -> None:
    scaler, weight = tfmp.GradScaler(8, enabled=enabled), tf1.get_variable("w", initializer=0.0, use_resource=True)
    accumulator = tfmp.GradientAccumulator([weight], 2)
    grad = tf1.placeholder(tf.float32, [])
    add = accumulator.add([scaler.scale(grad)], scaler.loss_scale)
    optimizer = tf1.train.GradientDescentOptimizer(1.0)
    scaler.step(optimizer, zip(scaler.unscale(optimizer, accumulator), [weight], strict=True))
    update_op = scaler.update()
    session.run([tf1.global_variables_initializer()])
    for grads, expected in [((1.0, 2.0), -1.5), ((1.0, math.inf), -1.5), ((3.0, 4.0), -5.0)]:
        for value in grads:
            session.run(add, {grad: value})
        session.run(update_op)
        assert session.run(weight) == expected


def test_hook_reports_on_a_scaler(session: tf1.Session, caplog: pytest.LogCaptureFixture) -> None:
    scaler = tfmp.GradScaler(1024)
    nets = _TwoNets(scaler)
    update_op = scaler.update()
    hooks = [tfmp.LossScaleLoggingHook(manager, every_n_steps=10) for manager in (None, scaler)]
    with tf1.train.MonitoredSession(hooks=hooks) as monitored:
        for factor in (1.0, math.inf):
            monitored.run(update_op, {nets.factor: factor})
    reports = [record.message for record in caplog.records if record.message.startswith("loss scale")]
    # The norm is that of the last call of `step`, the bias's; the report at the end comes too late to fetch one. With
    # control flow v2, the norm is in a conditional, whose tensors cannot be fetched.
    norm = "" if tf1.control_flow_v2_enabled() else ", gradient norm 2"
    assert sorted(set(reports)) == [
        f"loss scale 1024, global step 1, steps applied 1, skipped 0 (0 in a row){norm}",
        "loss scale 512, global step 1, steps applied 1, skipped 1 (1 in a row)",
    ]
    assert len(reports) == 4


@pytest.mark.parametrize("verb", ["state_dict", "load_state_dict"])
def test_state_as_numbers_is_refused_in_a_graph(session: tf1.Session, verb: str) -> None:
    arguments: list[Any] = [{}] if verb == "load_state_dict" else []
    with pytest.raises(RuntimeError, match=f"{verb} was called in a graph.*tf.compat.v1.train.Saver saves"):
        getattr(tfmp.GradScaler(8), verb)(*arguments)


def test_replay_is_refused_in_a_graph(session: tf1.Session) -> None:
    with pytest.raises(RuntimeError, match="while the optimizer's last_step_applied is False"):
        tfmp.replay(lambda: None, tfmp.GradScaler(8), max_replays=2)


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_update_runs_what_a_step_found(value: float, session: tf1.Session) -> None:
    scaler, weight = tfmp.GradScaler(8), tf1.get_variable("w", initializer=0.0, use_resource=True)
    scaler.step(tf1.train.GradientDescentOptimizer(1.0), [(scaler.scale(tf.constant(value)), weight)])
    update = scaler.update()
    session.run(tf1.global_variables_initializer())
    session.run(update)
    found = session.run([weight, scaler.loss_scale, scaler.applied_steps, scaler.skipped_steps])
    assert found == ([-1, 8, 1, 0] if math.isfinite(value) else [0, 4, 0, 1])


@pytest.mark.parametrize("num_unscaled", [1, 2])
@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "thrown away"])
def test_gradients_that_are_still_scaled_are_unscaled_by_the_step(
    session: tf1.Session, clips: bool, num_unscaled: int
) -> None:
    factor = tf1.placeholder(tf.float32, [])
    weights = [tf1.get_variable("first", initializer=1.0), tf1.get_variable("second", initializer=2.0)]
    scaler, optimizer = tfmp.GradScaler(1024), tf1.train.GradientDescentOptimizer(0.5)
    grads = tf1.gradients(scaler.scale(weights[0] + weights[1] * factor), weights)
    unscaled = scaler.unscale(optimizer, grads[:num_unscaled])
    if clips:
        grads[:num_unscaled] = [tf.clip_by_value(grad, -0.5, 0.5) for grad in unscaled]
    scaler.step(optimizer, zip(grads, weights, strict=True))
    update_op = scaler.update()
    session.run(tf1.global_variables_initializer())
    for value in (3.0, math.inf):
        session.run(update_op, {factor: value})
    steps = [0.25 if clips else 0.5, 0.25 if clips and num_unscaled == 2 else 1.5]
    assert session.run([*weights, scaler.loss_scale]) == [1 - steps[0], 2 - steps[1], 512]
