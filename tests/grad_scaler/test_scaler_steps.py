import contextlib
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import kerases
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp

pytestmark = pytest.mark.essential

_HOSTS: dict[str, Callable[[], Any]] = {
    "v1": functools.partial(tf.compat.v1.train.MomentumOptimizer, 0.5, 0.5),
    **{name: functools.partial(keras.optimizers.SGD, 0.5, momentum=0.5) for name, keras in kerases.installed().items()},
    **{
        f"{name} legacy": functools.partial(keras.optimizers.legacy.SGD, 0.5, momentum=0.5)
        for name, keras in kerases.installed().items()
        if name != "keras3"
    },
}

_for_every_host = pytest.mark.parametrize("host", _HOSTS)


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(1.0)


class _Loop:
    """A training with two losses and an optimizer for each; the gradient of the first is clipped."""

    def __init__(self, host: str, scaler: tfmp.GradScaler, together: bool = False, updates: bool = True) -> None:
        self._scaler, self._together, self._updates = scaler, together, updates
        self.kernel, self.bias = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
        self._optimizers = [_HOSTS[host](), _HOSTS[host]()]

    def step(self, factor: tf.Tensor) -> None:
        scaler, (first, second) = self._scaler, self._optimizers
        with tf.GradientTape(persistent=True) as tape:
            losses = {"first": tf.reduce_sum(self.kernel) * factor, "rest": [self.bias * self.bias]}
            scaled = scaler.scale(losses)
        (kernel_grad,) = scaler.unscale(first, tape.gradient(scaled["first"], [self.kernel]))
        # Clipping turns an infinite value into a finite one.
        kernel_grad = tf.clip_by_value(kernel_grad, -8.0, 8.0)
        bias_grad = tape.gradient(scaled["rest"][0], self.bias)
        steps = [(first, [(kernel_grad, self.kernel)]), (second, [(bias_grad, self.bias)])]
        if self._together:
            scaler.step_all(steps)
        else:
            for optimizer, grads_and_vars in steps:
                scaler.step(optimizer, grads_and_vars)
        if self._updates:
            scaler.update()

    @property
    def state(self) -> tuple[list[float], float, float]:
        return self.kernel.numpy().tolist(), float(self.bias.numpy()), float(self._scaler.loss_scale)


_EACH = [([0.5, 1.5], 0.0, 1024.0), ([0.5, 1.5], -0.5, 512.0), ([-0.75, 0.25], -0.25, 512.0)]


@pytest.mark.parametrize(
    ("host", "mode"),
    # Tests below run all hosts in a `tf.function`.
    [*((host, mode) for host in _HOSTS for mode in ("eager", "xla")), ("v1", "function"), ("v1", "updated_outside")],
)
def test_each_optimizer_with_finite_gradients_steps(host: str, mode: str) -> None:
    scaler = tfmp.GradScaler(1024)
    loop = _Loop(host, scaler, updates=mode != "updated_outside")
    step = loop.step if mode == "eager" else tf.function(loop.step, jit_compile=mode == "xla")
    for factor, expected in zip([1.0, math.inf, 2.0], _EACH, strict=True):
        step(tf.constant(factor))
        if mode == "updated_outside":
            scaler.update()
        assert loop.state == expected
    assert [int(count) for count in scaler.manager.get_status()[1:]] == [True, True, 3, 2, 1, 0]


@_for_every_host
def test_step_all_steps_all_optimizers_or_none(host: str) -> None:
    loop = _Loop(host, tfmp.GradScaler(1024), together=True)
    step = tf.function(loop.step)
    expected = [([0.5, 1.5], 0.0, 1024.0), ([0.5, 1.5], 0.0, 512.0), ([-0.75, 0.25], -0.5, 512.0)]
    for factor, state in zip([1.0, math.nan, 2.0], expected, strict=True):
        step(tf.constant(factor))
        assert loop.state == state


@pytest.mark.parametrize(
    ("host", "mode"), [*((host, "function") for host in _HOSTS), ("v1", "eager"), ("v1", "updated_outside")]
)
def test_overflow_on_the_second_replica_alone_skips_both(
    host: str, mode: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        scaler = tfmp.GradScaler(1024)
        loop = _Loop(host, scaler, updates=mode != "updated_outside")

    def on_replica(factor: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        loop.step(tf.where(tf.equal(replica, 1), factor, 1.0))

    def step(factor: tf.Tensor) -> None:
        two_replicas.run(on_replica, args=(factor,))

    step = tf.function(step) if mode == "function" else step
    expected = [([0.0, 1.0], -1.0, 1024.0), ([0.0, 1.0], 0.0, 512.0), ([-2.0, -1.0], 0.5, 512.0)]
    for factor, state in zip([1.0, math.inf, 2.0], expected, strict=True):
        step(tf.constant(factor))
        if mode == "updated_outside":
            scaler.update()
        assert loop.state == state
    assert [int(count) for count in scaler.manager.get_status()[1:]] == [True, True, 3, 2, 1, 0]


def test_optimizer_may_step_in_some_iterations_only() -> None:
    scaler = tfmp.GradScaler(8)
    often, seldom = (tf.Variable(0.0), _sgd()), (tf.Variable(0.0), _sgd())

    @tf.function
    def iterate(index: tf.Tensor) -> None:
        for weight, optimizer in (often, seldom):
            if weight is often[0] or index % 2 == 1:
                scaler.step(optimizer, [(scaler.scale(1.0), weight)])
        scaler.update()

    for index in range(4):
        iterate(tf.constant(index))
    assert (float(often[0]), float(seldom[0]), int(scaler.applied_steps)) == (-4, -2, 4)


@_for_every_host
def test_variable_without_a_gradient_is_not_changed(host: str) -> None:
    scaler, optimizer = tfmp.GradScaler(8), _HOSTS[host]()
    variables = [tf.Variable(1.0), tf.Variable(1.0)]
    for trained in (0, 1):
        grads = [scaler.scale(1.0) if index == trained else None for index in range(2)]
        scaler.step(optimizer, zip(grads, variables, strict=True))
        scaler.update()
    # With momentum, a variable that was trained in the first step would move again if it got a gradient of 0.
    assert [float(variable) for variable in variables] == [0.5, 0.5]


@_for_every_host
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("mode", ["eager", "function", "replicas"])
def test_variable_that_has_no_gradient_at_first_is_trained_later(
    host: str, enabled: bool, mode: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope() if mode == "replicas" else contextlib.nullcontext():
        scaler, optimizer = tfmp.GradScaler(8, enabled=enabled), _HOSTS[host]()
        variables = [tf.Variable(1.0), tf.Variable(1.0)]

    def iterate(trained: int) -> None:
        grads = [scaler.scale(tf.constant(0.5)) if index == trained else None for index in range(2)]
        scaler.step(optimizer, zip(grads, variables, strict=True))

    def run(trained: int) -> None:
        if mode == "replicas":
            two_replicas.run(iterate, args=(trained,))
        else:
            iterate(trained)
        scaler.update()

    run = tf.function(run) if mode == "function" else run
    for trained in (0, 1):
        run(trained)
    # With replicas, the optimizer sums their gradients.
    assert [float(variable.numpy()) for variable in variables] == [0.5 if mode == "replicas" else 0.75] * 2


@_for_every_host
def test_disabled_scaler_trains_like_the_optimizer_alone(host: str) -> None:
    scaler, optimizer, plain = tfmp.GradScaler(enabled=False), _HOSTS[host](), _HOSTS[host]()
    weight, plain_weight = tf.Variable(1.0), tf.Variable(1.0)
    before = [variable.numpy().tolist() for variable in scaler.variables]
    for factor in (0.3, math.inf):
        with tf.GradientTape() as tape:
            loss = weight * weight * factor
            assert scaler.scale(loss) is loss
        grads = tape.gradient(loss, [weight])
        assert scaler.unscale(optimizer, grads)[0] is grads[0]
        scaler.step(optimizer, zip(grads, [weight], strict=True))
        scaler.update()
        with tf.GradientTape() as tape:
            loss = plain_weight * plain_weight * factor
        plain.apply_gradients([(tape.gradient(loss, plain_weight), plain_weight)])
        assert float(weight) == float(plain_weight)
    assert math.isinf(float(weight))
    assert [variable.numpy().tolist() for variable in scaler.variables] == before
    assert (scaler.state_dict(), float(scaler.loss_scale), bool(scaler.last_step_finite)) == ({}, 1.0, True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_new_scale_is_set_and_the_steps_are_counted(compiled: bool) -> None:
    scaler, weight, optimizer = tfmp.GradScaler(8), tf.Variable(0.0), _sgd()

    def iterate(grad: tf.Tensor, new_scale: tf.Tensor) -> None:
        scaler.step(optimizer, [(grad, weight)])
        scaler.update(new_scale)

    run = tf.function(iterate) if compiled else iterate
    run(tf.constant(8.0), tf.constant(32.0))
    run(tf.constant(math.inf), tf.constant(16.0))
    assert (float(weight), float(scaler.loss_scale)) == (-1, 16)
    assert (int(scaler.applied_steps), int(scaler.skipped_steps)) == (1, 1)
    for bad in (math.nan, math.inf, 0.5, -8.0):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"scale|finite"):
            run(tf.constant(16.0), tf.constant(bad))
        # If the scale is refused, the step is not counted, although its gradient was applied before.
        assert (float(scaler.loss_scale), int(scaler.attempted_steps)) == (16, 2)
        scaler.abandon()


@pytest.mark.parametrize(
    ("new_scale", "error", "message"),
    [
        ("8", TypeError, "loss_scale must be a number, got '8'"),
        (True, TypeError, "loss_scale must be a number, got True"),
        (math.nan, ValueError, "loss_scale must be finite, got nan"),
        (-8, ValueError, "loss_scale must be a float32 number of at least 1, got -8"),
        (2.0**30, ValueError, "loss_scale must not be greater than max_loss_scale, got 1073741824.0"),
    ],
)
def test_new_scale_out_of_range_is_refused_before_anything_changes(
    new_scale: Any, error: type[Exception], message: str
) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 2, max_loss_scale=1024)
    scaler = tfmp.GradScaler(manager=manager)
    scaler.step(_sgd(), [(tf.constant(8.0), tf.Variable(0.0))])
    with pytest.raises(error, match=message):
        scaler.update(new_scale)
    assert (float(scaler.loss_scale), int(scaler.attempted_steps)) == (8, 0)
    # The next update still counts the step.
    scaler.update()
    assert int(scaler.applied_steps) == 1


@pytest.mark.parametrize("manager", [tfmp.FixedLossScaleManager, lambda scale: tfmp.LogMaxLossScaleManager()])
def test_scale_of_other_managers_cannot_be_set(manager: Callable[[float], tfmp.LossScaleManager]) -> None:
    with pytest.raises(NotImplementedError, match="cannot be set: use a tfmp"):
        tfmp.GradScaler(manager=manager(8)).update(16)


def test_manager_gets_the_largest_magnitude_of_all_optimizers() -> None:
    scaler = tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager())
    alone = tfmp.LogMaxLossScaleManager()
    for _ in range(2):
        for magnitude in (4.0, 64.0, 1.0):
            scaler.step(_sgd(), [(scaler.scale(magnitude), tf.Variable(0.0))])
        scaler.update()
        alone.update_loss_scale(tf.constant(True), tf.constant(64.0))
        # The magnitude is that of this iteration, not of all iterations before.
        assert float(scaler.loss_scale) == float(alone.get_loss_scale())
    scaler.step(_sgd(), [(scaler.scale(1.0), tf.Variable(0.0))])
    scaler.update()
    alone.update_loss_scale(tf.constant(True), tf.constant(1.0))
    assert scaler.state_dict() == alone.state_dict()


def test_steps_are_counted_per_iteration_and_overflows_per_optimizer() -> None:
    scaler, first, second = tfmp.GradScaler(8), tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")
    optimizers = [_sgd(), _sgd()]
    for grad in (8.0, math.nan, math.inf):
        scaler.step(optimizers[0], [(tf.constant(8.0), first)])
        scaler.step(optimizers[1], [(tf.constant(grad), second)])
        scaler.update()
    assert not scaler.last_step_finite
    counts = (scaler.attempted_steps, scaler.applied_steps, scaler.skipped_steps, scaler.consecutive_skipped_steps)
    assert [int(count) for count in counts] == [3, 1, 2, 2]
    # Unscaled, the gradients of 8 are 1, 1 and 2, because the scale has halved before the last step.
    assert (float(first), float(second)) == (-4, -1)
    reports = {report.names[0]: report.steps.numpy().tolist() for report in scaler.overflow_reports()}
    assert reports == {"first:0": [0], "second:0": [2]}


@pytest.mark.parametrize(("overflow_drops", "expected"), [("window", 0.0), ("micro_batch", -2.0)])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_mean_of_a_window_is_clipped_and_applied_as_overflow_drops_says(
    overflow_drops: str, expected: float, enabled: bool, compiled: bool
) -> None:
    scaler, weight, optimizer = tfmp.GradScaler(8, enabled=enabled), tf.Variable(0.0), _sgd()
    accumulator = tfmp.GradientAccumulator([weight], 2, overflow_drops=overflow_drops)

    def window(grads: tf.Tensor) -> None:
        for grad in tf.unstack(grads):
            accumulator.add([scaler.scale(grad)], scaler.loss_scale)
        (mean,) = scaler.unscale(optimizer, accumulator)
        scaler.step(optimizer, [(tf.clip_by_value(mean, -2.0, 2.0), weight)])
        scaler.update()

    run = tf.function(window) if compiled else window
    run(tf.constant([6.0, math.inf]))
    assert float(weight) == expected
    assert float(scaler.loss_scale) == (4 if enabled else 1)
    run(tf.constant([1.0, 2.0]))
    assert float(weight) == expected - 1.5


class _Kind(enum.IntEnum):
    """What an iteration does with an optimizer."""

    NOTHING = 0
    STEP = 1
    UNSCALE_AND_STEP = 2
    UNSCALE_AND_DROP = 3


@functools.cache
def _cached_training() -> tuple[tfmp.GradScaler, Callable[[tf.Tensor, tf.Tensor], None], list[tf.Variable]]:
    scaler = tfmp.GradScaler(64, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    weights, optimizers = [tf.Variable(0.0) for _ in range(3)], [_sgd() for _ in range(3)]

    @tf.function
    def iterate(grads: tf.Tensor, kinds: tf.Tensor) -> None:
        for index, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            scaled, kind = scaler.scale(grads[index]), kinds[index]
            if kind == _Kind.STEP:
                scaler.step(optimizer, [(scaled, weight)])
            elif kind != _Kind.NOTHING:
                (grad,) = scaler.unscale(optimizer, [scaled])
                if kind == _Kind.UNSCALE_AND_STEP:
                    scaler.step(optimizer, [(grad, weight)])
        scaler.update()

    return scaler, iterate, weights


_ONE_OPTIMIZER = st.tuples(st.sampled_from(_Kind), st.sampled_from([1.0, -2.0, math.inf, math.nan]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(_ONE_OPTIMIZER, min_size=3, max_size=3).filter(lambda each: any(kind for kind, _ in each)), max_size=8
    )
)
def test_scale_moves_by_the_rule_of_torch(iterations: list[list[tuple[_Kind, float]]]) -> None:
    scaler, iterate, weights = _cached_training()
    scaler.load_state_dict({"loss_scale": 64, "good_steps": 0, "bad_steps": 0})
    for weight in weights:
        weight.assign(0.0)
    scale, growth_tracker, expected = 64.0, 0, [0.0] * 3
    applied, skipped = int(scaler.applied_steps), int(scaler.skipped_steps)
    for optimizers in iterations:
        iterate(tf.constant([grad for _, grad in optimizers]), tf.constant([int(kind) for kind, _ in optimizers]))
        finite = all(math.isfinite(grad) for kind, grad in optimizers if kind)
        growth_tracker = growth_tracker + 1 if finite else 0
        if not finite:
            scale = max(1.0, scale * 0.25)
        elif growth_tracker == 2:
            scale, growth_tracker = scale * 4.0, 0
        stepped = [kind in (_Kind.STEP, _Kind.UNSCALE_AND_STEP) for kind, _ in optimizers]
        for index, (_, grad) in enumerate(optimizers):
            if stepped[index] and math.isfinite(grad):
                expected[index] -= grad
        applied, skipped = applied + (finite and any(stepped)), skipped + (not finite)
        state = scaler.state_dict()
        assert (state["loss_scale"], state["good_steps"]) == (scale, growth_tracker)
        assert (int(scaler.applied_steps), int(scaler.skipped_steps)) == (applied, skipped)
        assert [float(weight) for weight in weights] == expected


def test_replicas_accumulate_in_a_python_loop(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        scaler, optimizer, weight = tfmp.GradScaler(8), _sgd(), tf.Variable(0.0)
        accumulator = tfmp.GradientAccumulator([weight], accumulation_steps=2)

    def add(factor: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            scaled = scaler.scale(weight * factor * tf.gather([0.5, 1.5], replica))
        accumulator.add([tape.gradient(scaled, weight)], scaler.loss_scale)

    def take_step() -> None:
        scaler.step(optimizer, zip(scaler.unscale(optimizer, accumulator), [weight], strict=True))
        scaler.update()

    @tf.function
    def train_on_window(factors: tf.Tensor) -> None:
        for factor in tf.unstack(factors, 2):
            two_replicas.run(add, args=(factor,))
        two_replicas.run(take_step)

    seen = []
    for factors in ([1.0, 3.0], [math.inf, 1.0], [2.0, 2.0]):
        train_on_window(tf.constant(factors))
        seen.append((float(weight.numpy()), float(scaler.loss_scale)))
    assert seen == [(-4, 8), (-4, 4), (-8, 4)]


def test_losses_of_a_generator_are_scaled_as_a_list() -> None:
    assert [float(loss) for loss in tfmp.GradScaler(8).scale(loss for loss in (1.0, 2.0))] == [8, 16]
