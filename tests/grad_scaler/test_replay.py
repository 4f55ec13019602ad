"""`tfmp.replay` repeats a step on its batch while it is skipped; wrong arguments are in test_scaler_refusals.py."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from scaler_loops import IN_ALL_WAYS, IN_BOTH_WAYS, WAYS, counts, sgd

import tfmp


class _Training:
    """One or two optimizers with gradients of 4; a scaled gradient is infinite above its optimizer's limit."""

    def __init__(self, *limits: float, scale: Any = 128.0, enabled: bool = True) -> None:
        manager = scale if isinstance(scale, tfmp.LossScaleManager) else None
        self.scaler = tfmp.GradScaler(enabled=enabled, **({"manager": manager} if manager else {"init_scale": scale}))
        self.calls, self.traces, self._limits = tf.Variable(0), 0, limits
        self._optimizers, self._weights = [sgd() for _ in limits], [tf.Variable(0.0) for _ in limits]

    def _pairs(self) -> list[tuple[Any, list[Any]]]:
        self.traces += 1
        self.calls.assign_add(1)
        scaled = self.scaler.scale(tf.constant(4.0))
        grads = [tf.where(scaled > limit, math.inf, scaled) for limit in self._limits]
        return [
            (optimizer, [(grad, weight)])
            for optimizer, grad, weight in zip(self._optimizers, grads, self._weights, strict=True)
        ]

    def together(self) -> dict[str, Any]:
        scale = self.scaler.scale(tf.constant(1.0))
        self.scaler.step_all(self._pairs())
        self.scaler.update()
        return {"scale": scale, "none": None, "calls": [self.calls.read_value()]}

    def each(self) -> None:
        for optimizer, pairs in self._pairs():
            self.scaler.step(optimizer, pairs)
        self.scaler.update()

    def with_two_updates(self) -> None:
        for index in range(2):
            self.scaler.step(*self._pairs()[index])
            self.scaler.update()

    def dropped(self) -> None:
        ((optimizer, [(grad, weight)]),) = self._pairs()
        (grad,) = self.scaler.unscale(optimizer, [grad])
        if grad < 2.0:
            self.scaler.step(optimizer, [(grad, weight)])
        self.scaler.update()

    def replay(self, step: Callable[[], Any], way: str) -> Any:
        return WAYS[way](lambda: tfmp.replay(step, self.scaler, max_replays=5))()

    def state(self) -> list[float]:
        return [*map(float, self._weights), float(self.scaler.loss_scale), int(self.calls)]


@IN_ALL_WAYS
@pytest.mark.parametrize("in_function", [False, True], ids=["", "step in a function"])
def test_step_is_repeated_until_it_is_applied(way: str, in_function: bool) -> None:
    training = _Training(64.0)
    step = tf.function(training.together) if in_function else training.together
    result = training.replay(step, way)
    # The step overflows at 128, 64 and 32. `replay` returns the result of the last call.
    assert (float(result["scale"]), result["none"], int(result["calls"][0])) == (16, None, 4)
    assert (training.state(), counts(training.scaler)) == ([-4, 16, 4], [1, 3, 0])
    training.replay(step, way)
    assert (training.state(), counts(training.scaler)) == ([-8, 16, 5], [2, 3, 0])
    # TensorFlow traces a function twice if it makes variables. This function makes none.
    traces = training.traces
    training.replay(step, "function")
    assert training.traces - traces <= 1


def _exponential(init: float, overflows: int) -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(init, 10, decr_every_n_nan_or_inf=overflows, decr_ratio=0.5)


#: The training, its step, the weights and the scale after it with the number of calls; or an error without the latter.
_REPLAYED: dict[str, tuple[Callable[[], _Training], str, list[float], str | None]] = {
    "always overflows": (lambda: _Training(0.0), "together", [0, 2, 6], None),
    "scale falls after two": (lambda: _Training(64.0, scale=_exponential(32, 2)), "together", [-4, 16, 3], None),
    "optimizers step together": (lambda: _Training(512.0, 64.0), "together", [-4, -4, 16, 4], None),
    "both optimizers are skipped": (lambda: _Training(64.0, 64.0), "each", [-4, -4, 16, 4], None),
    "both updates are skipped": (lambda: _Training(64.0, 32.0, scale=32.0), "with_two_updates", [-4, -4, 8, 4], None),
    # A dropped step is repeated for an overflow and for nothing else.
    "dropped": (lambda: _Training(64.0, scale=64.0), "dropped", [0, 16, 3], None),
    # A scaler that is enabled may not replay at a scale that never falls.
    "not enabled": (
        lambda: _Training(0.0, scale=tfmp.FixedLossScaleManager(8), enabled=False),
        "each",
        [-math.inf, 1, 1],
        None,
    ),
    # Nothing is applied twice if a step is skipped in part.
    "one optimizer is skipped": (lambda: _Training(512.0, 64.0), "each", [-4, 0, 64], "Let them step together"),
    "one update is skipped": (
        lambda: _Training(64.0, 16.0, scale=16.0),
        "with_two_updates",
        [-4, 0, 8],
        "it updated the scale several times",
    ),
}


@IN_ALL_WAYS
@pytest.mark.parametrize("name", _REPLAYED)
def test_batch_is_replayed_while_it_is_skipped_as_a_whole(name: str, way: str) -> None:
    make, step, state, message = _REPLAYED[name]
    training = make()
    # XLA drops errors; the replay ends.
    refuses, errors = message is not None and way != "xla", (RuntimeError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors, match=message) if refuses else contextlib.nullcontext():
        training.replay(getattr(training, step), way)
    assert training.state()[: len(state)] == state


@IN_BOTH_WAYS
def test_batch_is_replayed_no_more_often_than_is_said(way: str) -> None:
    training = _Training(0.0)
    WAYS[way](lambda: tfmp.replay(training.together, training.scaler, max_replays=2))()
    assert training.state() == [0, 16, 3]


@IN_BOTH_WAYS
def test_replicas_replay_together(way: str, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        scaler, weight, optimizer = tfmp.GradScaler(32), tf.Variable(0.0), sgd()

    def on_replica() -> tf.Tensor:
        scaled = scaler.scale(4.0)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        overflows = tf.logical_and(tf.equal(replica, 1), scaled > 64.0)
        scaler.step(optimizer, [(tf.where(overflows, math.inf, scaled), weight)])
        scaler.update()
        return scaled

    result = WAYS[way](lambda: tfmp.replay(lambda: two_replicas.run(on_replica), scaler, max_replays=3))()
    assert [float(value) for value in two_replicas.experimental_local_results(result)] == [64, 64]
    assert (float(weight.numpy()), float(scaler.loss_scale), int(scaler.skipped_steps)) == (-8, 16, 1)
    with pytest.raises(RuntimeError, match="replay was called on a replica: call it outside of"):
        two_replicas.run(lambda: tfmp.replay(on_replica, scaler, max_replays=3))


@IN_BOTH_WAYS
def test_wrapped_optimizer_replays_too(way: str) -> None:
    opt, weight, calls = tfmp.LossScaleOptimizer(sgd(), _exponential(8, 1)), tf.Variable(0.0), tf.Variable(0)

    def train_step() -> None:
        factor = tf.where(calls.assign_add(1) < 3, math.inf, 4.0)
        opt.minimize(lambda: weight * factor, var_list=[weight])

    WAYS[way](lambda: tfmp.replay(train_step, opt, max_replays=5))()
    assert (float(weight), float(opt.loss_scale), int(calls)) == (-4, 2, 3)


def test_call_that_takes_no_step_is_not_replayed() -> None:
    training, calls = _Training(0.0), list[None]()
    training.together()
    assert not training.scaler.last_step_finite
    training.replay(lambda: calls.append(None), "eager")
    assert len(calls) == 1
