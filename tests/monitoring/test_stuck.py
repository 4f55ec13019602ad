"""What tells a training that is stuck from one whose scale is on its way down."""

import math
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
from reporters import logged

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.monitoring.stuck import StuckWatch, several_processes, why_stuck


def _status(scale: float, skips: int, applied: int = 5) -> LossScaleStatus:
    return LossScaleStatus(scale, skips == 0, skips == 0, applied + skips, applied, skips, skips)


_AT_FLOOR = "the loss scale is at its floor, 0.25, and {} steps in a row overflowed all the same: "
_TOO_LARGE = "the gradients are too large for float16 by themselves; let the scale fall below 1: pass"


@pytest.mark.parametrize(
    ("scale", "skips", "per_backoff", "at_floor", "loss", "reason"),
    [
        (1.0, 0, 1, 0, 3.0, None),
        (2.0, 7, 1, 0, 3.0, None),
        (2.0, 8, 1, 0, None, "last 8 steps were skipped, enough to lower the loss scale 8 times, and it is 2 now"),
        (2.0, 15, 2, 0, None, None),
        (2.0, 16, 2, 0, None, "last 16 steps were skipped, enough to lower the loss scale 8 times"),
        (1.0, 7, None, 0, None, None),  # a fixed scale of 1
        (
            1.0,
            8,
            None,
            0,
            None,
            "last 8 steps were skipped, and the loss scale is 1 now: a fixed scale may be too high",
        ),
        (2.0, 1, 2, 0, math.nan, "the loss is NaN before it is scaled"),
        (2.0, 1, 2, 0, -math.inf, "the loss is infinite before it is scaled"),
        (2.0, 0, 2, 0, math.nan, None),  # the step was applied
        # The floor is reached when a back-off there changed nothing.
        (0.25, 7, 1, 1, None, None),
        (0.25, 7, 1, 2, None, _AT_FLOOR.format(2) + _TOO_LARGE),
        (0.25, 7, 3, 2, None, None),
        (0.25, 7, 3, 3, None, _AT_FLOOR.format(3)),
        (0.25, 7, None, 1, None, None),
        (0.25, 7, None, 2, None, _AT_FLOOR.format(2)),
        # It is suspected itself, unless it is very low.
        (1024.0, 7, 2, 2, None, "overflowed all the same: the floor may be too high; let the scale fall lower: pass"),
        (1.0, 7, 2, 2, None, f"overflowed all the same: {_TOO_LARGE}"),
        (2.0**-20, 7, 2, 2, None, "all the same: no scale makes the gradients finite; lower the learning rate"),
    ],
)
def test_stuck_is_told_from_too_high(
    scale: float, skips: int, per_backoff: int | None, at_floor: int, loss: float | None, reason: str | None
) -> None:
    status = _status(scale, skips)
    found = why_stuck(status, scale, per_backoff, stuck_after=8, skips_at_floor=at_floor, loss=loss)
    assert found is None if reason is None else reason in str(found)
    assert found is None or "tfmp.check_precision" in found
    # Spikes are no overflows.
    spike = status._replace(last_step_finite=True)
    assert why_stuck(spike, scale, per_backoff, stuck_after=8, skips_at_floor=at_floor, loss=loss) is None


_FIXED = tfmp.FixedLossScaleManager(1)


def _manager(floor: float = 1, **settings: Any) -> tfmp.LossScaleManager:
    settings = {"decr_every_n_nan_or_inf": 1} | settings
    return tfmp.ExponentialUpdateLossScaleManager(1, 1000, min_loss_scale=floor, **settings)


@pytest.mark.parametrize(
    ("manager", "statuses", "stops_at", "warnings"),
    [
        # No step has run at 1 at the third status: the steps that bring the scale to its floor do not count.
        pytest.param(_manager, [(4, 1), (2, 2), (1, 3), (1, 4), (1, 5)], [4], 1, id="steps on the way"),
        # Between the reports, finite steps raise the scale to 8, and three overflows lower it to 1 again.
        pytest.param(_manager, [(1, 0, 4), (1, 3, 16), (1, 4, 16), (1, 5, 16)], [3], 1, id="left between reports"),
        pytest.param(_manager, [(1, 0), (1, 2)], [1], 1, id="a streak that began at the floor"),
        pytest.param(lambda: _manager(0.25), [(0.5, 1), (0.5, 2), (0.25, 3), (0.25, 5)], [3], 1, id="the manager's"),
        pytest.param(lambda: _manager(tolerance=0.5), [(1, 1), (1, 2), (1, 3)], [2], 1, id="a tolerance"),
        pytest.param(lambda: _FIXED, [(1, 1), (1, 7), (1, 8)], [2], 1, id="a fixed scale is no floor"),
        pytest.param(_manager, [(1, 1), (1, 3), (1, 4), (1, 0, 6), (1, 3, 6)], [1, 4], 2, id="said once until a step"),
    ],
)
def test_floor_counts_the_steps_that_ran_there_and_each_streak_is_told_once(
    manager: Any, statuses: list[tuple[float, ...]], stops_at: list[int], warnings: int
) -> None:
    watch, watched = StuckWatch("stop", 8), manager()
    for _ in range(2):
        with logged() as log:
            stops = [watch.wants_stop(watched, _status(*status)) for status in statuses]
        assert [index for index, stop in enumerate(stops) if stop] == stops_at
        assert len(log.warnings) == warnings
        # A new run tells it again.
        watch.start()
    if watched is _FIXED:
        assert 'For a scale below 1, pass {"min_loss_scale": 2**-20} as the loss-scale manager.' in log.warnings[0]


@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_loss_of_one_of_several_processes_decides_nothing(policy: Any) -> None:
    watch, manager = StuckWatch(policy, 8), _manager()
    watch.start(several=True)
    with logged() as log:
        assert [watch.wants_stop(manager, _status(8, skips), [math.nan]) for skips in (1, 2)] == [False, False]
    (warning,) = log.warnings
    assert "the loss is NaN before it is scaled" in warning
    assert "Training stops here" not in warning
    # Within the same streak, the watch still acts on the status, which all processes share.
    if policy == "stop":
        assert watch.wants_stop(manager, _status(2, 8), [math.nan])
    else:
        with pytest.raises(tfmp.LossScaleStuckError, match="the last 8 steps were skipped"):
            watch.wants_stop(manager, _status(2, 8), [math.nan])


def test_at_the_end_of_training_it_is_only_said() -> None:
    with logged() as log:
        assert not StuckWatch("raise", 8).wants_stop(_manager(), _status(2, 1), [math.nan], at_end=True)
    (warning,) = log.warnings
    assert "the loss is NaN before it is scaled" in warning


class _Strategy(NamedTuple):
    """What is asked of a strategy that knows its cluster."""

    cluster_resolver: Any


def test_one_of_several_workers_may_not_stop_by_its_clock(
    two_replicas: tf.distribute.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Replicas of one process are no several processes, and neither are parameter servers.
    assert not several_processes(two_replicas)
    for jobs, several in (({"worker": 2}, True), ({"chief": 1, "worker": 1}, True), ({"worker": 1, "ps": 2}, False)):
        cluster = {job: [f"localhost:{port}" for port in range(1, count + 1)] for job, count in jobs.items()}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster))
        assert several_processes(_Strategy(resolver)) == several
    monkeypatch.setattr("tfmp.monitoring.hooks.several_processes", lambda strategy: True)
    with tf.Graph().as_default():
        manager = tfmp.FixedLossScaleManager(8)
        for settings in ({"every_n_secs": 2}, {"on_stuck": "stop"}):
            tfmp.LossScaleLoggingHook(manager, **settings).begin()
        with pytest.raises(ValueError, match="with every_n_secs=2 one process would stop before the others"):
            tfmp.LossScaleLoggingHook(manager, every_n_secs=2, on_stuck="raise").begin()
