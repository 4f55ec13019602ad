import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmp


class _Training:
    """A training whose gradient is 4. A scaled gradient above the limit becomes infinite, as in half precision."""

    def __init__(self, scaler: Any, limit: float = 64.0, compiled: bool | None = False) -> None:
        self.scaler, self.weight = scaler, tf.Variable(0.0)
        self.calls, self.traces = tf.Variable(0), 0
        self._optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        self._limit = limit
        self.step = self._step if compiled is None else tf.function(self._step, jit_compile=compiled)

    def _step(self) -> dict[str, Any]:
        self.traces += 1
        self.calls.assign_add(1)
        scaled = self.scaler.scale(4.0)
        grad = tf.where(scaled > self._limit, math.inf, scaled)
        self.scaler.step(self._optimizer, [(grad, self.weight)])
        self.scaler.update()
        return {"scale": scaled / 4.0, "none": None, "calls": [self.calls.read_value()]}


# For each mode: whether XLA compiles the step (None if it is not a `tf.function`); whether `replay` is in a function.
_MODES: dict[str, tuple[bool | None, bool]] = {
    "eager": (None, False),
    "step in a function": (False, False),
    "all in a function": (None, True),
    "within XLA": (True, True),
}

_ON_DEVICE = pytest.mark.parametrize("on_device", [False, True], ids=["eager", "function"])


@pytest.mark.parametrize("mode", _MODES)
def test_step_is_repeated_until_it_is_applied(mode: str) -> None:
    compiled, on_device = _MODES[mode]
    training = _Training(tfmp.GradScaler(128), compiled=compiled)

    def run() -> Any:
        return tfmp.replay(training.step, training.scaler, max_replays=5)

    run = tf.function(run) if on_device else run
    result = run()
    # The step overflows at 128, 64 and 32. `replay` returns the result of the last call.
    assert (float(result["scale"]), result["none"], int(result["calls"][0])) == (16, None, 4)
    assert (float(training.weight), int(training.calls)) == (-4, 4)
    assert [int(count) for count in training.scaler.manager.get_status()[1:]] == [True, True, 4, 1, 3, 0]
    run()
    assert (float(training.weight), int(training.calls)) == (-8, 5)
    # TensorFlow traces a function twice if it makes variables. This function makes none.
    traces = training.traces
    tf.function(lambda: tfmp.replay(training.step, training.scaler, max_replays=5))()
    assert training.traces - traces <= 1


@_ON_DEVICE
def test_batch_that_always_overflows_is_given_up(on_device: bool) -> None:
    training = _Training(tfmp.GradScaler(128), limit=0.0, compiled=None)

    def run() -> Any:
        return tfmp.replay(training.step, training.scaler, max_replays=2)

    (tf.function(run) if on_device else run)()
    assert (float(training.weight), int(training.calls), float(training.scaler.loss_scale)) == (0, 3, 16)


def test_manager_that_shrinks_after_two_overflows_replays_once_at_the_same_scale() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(32, 10, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    training = _Training(tfmp.GradScaler(manager=manager))
    tfmp.replay(training.step, training.scaler, max_replays=5)
    assert (float(training.weight), int(training.calls), float(manager.get_loss_scale())) == (-4, 3, 16)


@_ON_DEVICE
def test_replicas_replay_together(on_device: bool, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        scaler, weight = tfmp.GradScaler(32), tf.Variable(0.0)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)

    def on_replica() -> tf.Tensor:
        scaled = scaler.scale(4.0)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        overflows = tf.logical_and(tf.equal(replica, 1), scaled > 64.0)
        scaler.step(optimizer, [(tf.where(overflows, math.inf, scaled), weight)])
        scaler.update()
        return scaled

    def run() -> Any:
        return tfmp.replay(lambda: two_replicas.run(on_replica), scaler, max_replays=3)

    result = (tf.function(run) if on_device else run)()
    assert [float(value) for value in two_replicas.experimental_local_results(result)] == [64, 64]
    assert (float(weight.numpy()), float(scaler.loss_scale), int(scaler.skipped_steps)) == (-8, 16, 1)
    with pytest.raises(RuntimeError, match="replay was called on a replica: call it outside of"):
        two_replicas.run(lambda: tfmp.replay(on_replica, scaler, max_replays=3))


class _TwoSteps:
    """A training with two optimizers and gradients of 4; a scaled gradient is infinite above its optimizer's limit."""

    def __init__(self, limits: tuple[float, float], init_scale: float = 128.0) -> None:
        self.scaler, self._limits = tfmp.GradScaler(init_scale), limits
        self.weights = [tf.Variable(0.0), tf.Variable(0.0)]
        self._optimizers = [tf.compat.v1.train.GradientDescentOptimizer(1.0) for _ in limits]

    def _pairs(self) -> list[Any]:
        scaled = self.scaler.scale(4.0)
        grads = [tf.where(scaled > limit, math.inf, scaled) for limit in self._limits]
        return [
            (opt, [pair]) for opt, pair in zip(self._optimizers, zip(grads, self.weights, strict=True), strict=True)
        ]

    def together(self) -> None:
        self.scaler.step_all(self._pairs())
        self.scaler.update()

    def each(self) -> None:
        for optimizer, pairs in self._pairs():
            self.scaler.step(optimizer, pairs)
        self.scaler.update()

    def with_two_updates(self) -> None:
        for index in range(2):
            optimizer, pairs = self._pairs()[index]
            self.scaler.step(optimizer, pairs)
            self.scaler.update()

    def run(self, step: Callable[[], None], on_device: bool) -> None:
        def replay() -> None:
            tfmp.replay(step, self.scaler, max_replays=5)

        (tf.function(replay) if on_device else replay)()

    def state(self) -> list[float]:
        return [*map(float, self.weights), float(self.scaler.loss_scale)]


@_ON_DEVICE
def test_optimizers_that_step_together_replay(on_device: bool) -> None:
    training = _TwoSteps((512.0, 64.0))
    training.run(training.together, on_device)
    assert training.state() == [-4, -4, 16]


@_ON_DEVICE
def test_nothing_is_applied_twice_if_one_of_two_optimizers_is_skipped(on_device: bool) -> None:
    training = _TwoSteps((512.0, 64.0))
    with pytest.raises((RuntimeError, tf.errors.InvalidArgumentError), match="Let them step together"):
        training.run(training.each, on_device)
    assert training.state() == [-4, 0, 64]


@_ON_DEVICE
def test_two_optimizers_that_are_both_skipped_replay(on_device: bool) -> None:
    training = _TwoSteps((64.0, 64.0))
    training.run(training.each, on_device)
    assert training.state() == [-4, -4, 16]


@_ON_DEVICE
def test_two_skipped_updates_replay_until_both_are_applied(on_device: bool) -> None:
    training = _TwoSteps((64.0, 32.0), 32.0)
    training.run(training.with_two_updates, on_device)
    assert training.state() == [-4, -4, 8]


@_ON_DEVICE
def test_nothing_is_applied_twice_if_one_of_two_updates_is_skipped(on_device: bool) -> None:
    training = _TwoSteps((64.0, 16.0), 16.0)
    with pytest.raises((RuntimeError, tf.errors.InvalidArgumentError), match="it updated the scale several times"):
        training.run(training.with_two_updates, on_device)
    assert training.state() == [-4, 0, 8]


def test_replay_within_xla_ends_at_a_partial_skip() -> None:
    whole, parted = _Training(tfmp.GradScaler(128), compiled=None), _TwoSteps((512.0, 64.0))
    tf.function(lambda: tfmp.replay(whole.step, whole.scaler, max_replays=5), jit_compile=True)()
    assert (float(whole.weight), float(whole.scaler.loss_scale)) == (-4, 16)
    tf.function(lambda: tfmp.replay(parted.each, parted.scaler, max_replays=5), jit_compile=True)()
    assert parted.state() == [-4, 0, 64]


@_ON_DEVICE
def test_wrapped_optimizer_replays_too(on_device: bool) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 10, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), manager)
    weight, calls = tf.Variable(0.0), tf.Variable(0)

    def train_step() -> None:
        factor = tf.where(calls.assign_add(1) < 3, math.inf, 4.0)
        opt.minimize(lambda: weight * factor, var_list=[weight])

    def run() -> None:
        tfmp.replay(train_step, opt, max_replays=5)

    (tf.function(run) if on_device else run)()
    assert (float(weight), float(opt.loss_scale), int(calls)) == (-4, 2, 3)


def test_call_that_takes_no_step_is_not_replayed() -> None:
    training = _Training(tfmp.GradScaler(32))
    training.step()
    assert not training.scaler.last_step_finite
    calls: list[None] = []
    tfmp.replay(lambda: calls.append(None), training.scaler, max_replays=5)
    assert len(calls) == 1


def test_disabled_scaler_replays_nothing() -> None:
    scaler = tfmp.GradScaler(enabled=False, manager=tfmp.FixedLossScaleManager(8))
    training = _Training(scaler, limit=0.0)
    tfmp.replay(training.step, scaler, max_replays=5)
    assert (float(training.weight), int(training.calls)) == (-math.inf, 1)


@pytest.mark.parametrize(
    ("scaler", "max_replays", "error", "message"),
    [
        (lambda: tfmp.GradScaler(8), 0, ValueError, "max_replays must be a whole number from 1 to .*, got 0"),
        (lambda: tfmp.GradScaler(8), 1.5, ValueError, "max_replays must be a whole number from 1 to .*, got 1.5"),
        (lambda: tfmp.GradScaler(8), "2", TypeError, "max_replays must be a number, got '2'"),
        (lambda: tfmp.FixedLossScaleManager(8), 1, TypeError, "must be the tfmp.GradScaler or tfmp.LossScaleOptimizer"),
        (
            lambda: tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(8)),
            1,
            ValueError,
            "the scale of a FixedLossScaleManager never falls",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    scaler: Callable[[], Any], max_replays: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tfmp.replay(lambda: pytest.fail("the step was taken"), scaler(), max_replays=max_replays)
