"""What is said of overflows, of spikes and of a training that is stuck, and how norms are stored and drawn."""

import json
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reporters import logged

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.core.spikes.watch import SpikeReport
from tfmp.monitoring import summaries
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.reporter import overflow_sentence, overflow_table, spike_sentence
from tfmp.monitoring.stuck import StuckWatch, several_processes


def test_largest_counts_are_named_first_and_the_rest_counted() -> None:
    names, steps = [f"layer_{index}" for index in range(30)], np.arange(30)
    last = np.zeros([30, 3], np.int64)
    assert overflow_sentence(names, last) is None
    assert overflow_table(names, last, 0 * steps) is None
    last[:6] = [[0, 1, 0], [0, 0, 0], [3, 1, 0], [0, 0, 12], [1, 0, 0], [0, 2, 2]]
    assert overflow_sentence(names, last, at_most=3) == (
        "overflow in layer_3: 12 saturated; layer_2: 3 inf, 1 nan; layer_5: 2 nan, 2 saturated; and 2 more"
    )
    last[29] = [0, 7, 0]
    rows = str(overflow_table(names, last, steps)).splitlines()
    assert rows[1:3] == ["layer_29             29  7 nan", "layer_28             28"]
    assert rows[20:] == ["layer_10             10", "and 9 more"]


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ((0.1, 0.4, 0.2, 0.3), "layer_1 (40 %), layer_3 (30 %), layer_2 (20 %)"),
        ((0.996, 0.004), "layer_0 (100 %)"),
        # In a model of many variables, no share need be large.
        ((0.002, 0.004) * 200, "layer_1 (below 1 %)"),
    ],
)
def test_spike_is_told_with_its_norm_its_bound_and_its_largest_shares(shares: tuple[float, ...], named: str) -> None:
    names = [f"layer_{index}" for index in range(len(shares))]
    assert spike_sentence(SpikeReport(names, *map(np.array, (shares, 123456.0, 8.25, 3)))) == (
        f"spike: gradient norm 1.235e+05 above the bound 8.25, from {named}; 3 skipped so far"
    )


def _status(scale: float, skips: int, applied: int = 5) -> LossScaleStatus:
    return LossScaleStatus(scale, skips == 0, skips == 0, applied + skips, applied, skips, skips)


_FIXED = tfmp.FixedLossScaleManager(1)


def _manager(floor: float = 1, per_backoff: int = 1, **settings: Any) -> tfmp.LossScaleManager:
    settings = {"decr_every_n_nan_or_inf": per_backoff, "min_loss_scale": floor} | settings
    return tfmp.ExponentialUpdateLossScaleManager(max(1, floor), 1000, **settings)


_AT_FLOOR = "the loss scale is at its floor, {}, and {} steps in a row overflowed all the same: "
_TOO_LARGE = "the gradients are too large for float16 by themselves; let the scale fall below 1: pass"
_TOO_HIGH = "the floor may be too high; let the scale fall lower: pass"
_TOO_LOW = "no scale makes the gradients finite; lower the learning rate"


@pytest.mark.parametrize(
    ("manager", "statuses", "stops_at", "reason"),
    [
        pytest.param(_manager(), [(2, 0), (2, 7), (2, 8)], [2], "enough to lower the loss scale 8 times", id="8 steps"),
        pytest.param(_manager(1, 2), [(2, 15), (2, 16)], [1], "16 steps were skipped, enough to lower", id="16 steps"),
        # No step has run at 1 at the third status: the steps that bring the scale to its floor do not count.
        pytest.param(
            _manager(), [(4, 1), (2, 2), (1, 3), (1, 4), (1, 5)], [4], _AT_FLOOR.format(1, 2), id="on the way"
        ),
        # Between the reports, finite steps raise the scale to 8, and three overflows lower it to 1 again.
        pytest.param(_manager(), [(1, 0, 4), (1, 3, 16), (1, 4, 16), (1, 5, 16)], [3], _TOO_LARGE, id="left between"),
        pytest.param(_manager(), [(1, 0), (1, 2)], [1], _TOO_LARGE, id="a streak that began at the floor"),
        pytest.param(_manager(0.25), [(0.5, 2), (0.25, 3), (0.25, 5)], [2], _AT_FLOOR.format(0.25, 2), id="its own"),
        pytest.param(_manager(1, 3), [(1, 1), (1, 3), (1, 4)], [2], _AT_FLOOR.format(1, 3), id="a back-off of three"),
        pytest.param(_manager(tolerance=0.5), [(1, 1), (1, 2), (1, 3)], [2], _AT_FLOOR.format(1, 2), id="a tolerance"),
        # The floor is suspected itself, unless it is very low.
        pytest.param(_manager(1024), [(1024, 1), (1024, 3)], [1], _TOO_HIGH, id="a high floor"),
        pytest.param(_manager(2.0**-20), [(2.0**-20, 1), (2.0**-20, 3)], [1], _TOO_LOW, id="a low floor"),
        pytest.param(_FIXED, [(1, 1), (1, 7), (1, 8)], [2], "a fixed scale may be too high", id="fixed is no floor"),
        pytest.param(_manager(), [(1, 1), (1, 3), (1, 4), (1, 0, 6), (1, 3, 6)], [1, 4], _TOO_LARGE, id="said once"),
    ],
)
def test_floor_counts_the_steps_that_ran_there_and_each_streak_is_told_once(
    manager: Any, statuses: list[tuple[float, ...]], stops_at: list[int], reason: str
) -> None:
    watch, watched = StuckWatch("stop", 8), [_status(*status) for status in statuses]
    # Spikes are no overflows.
    assert not any(watch.wants_stop(manager, status._replace(last_step_finite=True)) for status in watched)
    for _ in range(2):
        # A new run tells it again.
        watch.start()
        with logged() as log:
            stops = [watch.wants_stop(manager, status) for status in watched]
        assert [index for index, stop in enumerate(stops) if stop] == stops_at
        assert len(log.warnings) == len(stops_at)
        assert reason in log.warnings[0]
        assert "tfmp.check_precision" in log.warnings[0]
    if manager is _FIXED:
        assert 'For a scale below 1, pass {"min_loss_scale": 2**-20} as the loss-scale manager.' in log.warnings[0]


@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_loss_of_one_of_several_processes_and_that_at_the_end_of_training_are_only_told(policy: Any) -> None:
    watch, manager = StuckWatch(policy, 8), _manager()
    watch.start(several=True)
    with logged() as log:
        assert [watch.wants_stop(manager, _status(8, skips), [math.nan]) for skips in (0, 1, 2)] == [False] * 3
        # Within the same streak, the watch still acts on the status, which all processes share.
        if policy == "stop":
            assert watch.wants_stop(manager, _status(2, 8), [math.nan])
        else:
            with pytest.raises(tfmp.LossScaleStuckError, match="the last 8 steps were skipped"):
                watch.wants_stop(manager, _status(2, 8), [math.nan])
        watch.start()
        assert not watch.wants_stop(manager, _status(2, 1), [math.nan], at_end=True)
    assert len(log.warnings) == (3 if policy == "stop" else 2)
    for warning in (log.warnings[0], log.warnings[-1]):
        assert "the loss is NaN before it is scaled" in warning
        assert "Training stops here" not in warning


def test_one_of_several_workers_may_not_stop_by_its_clock(
    two_replicas: tf.distribute.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Replicas of one process are no several processes, and neither are parameter servers.
    assert not several_processes(two_replicas)
    for jobs, several in (({"worker": 2}, True), ({"chief": 1, "worker": 1}, True), ({"worker": 1, "ps": 2}, False)):
        cluster = {job: [f"localhost:{port}" for port in range(1, count + 1)] for job, count in jobs.items()}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster))
        assert several_processes(types.SimpleNamespace(cluster_resolver=resolver)) == several
    monkeypatch.setattr("tfmp.monitoring.hooks.several_processes", lambda strategy: True)
    with tf.Graph().as_default():
        manager = tfmp.FixedLossScaleManager(8)
        for settings in ({"every_n_secs": 2}, {"on_stuck": "stop"}):
            tfmp.LossScaleLoggingHook(manager, **settings).begin()
        with pytest.raises(ValueError, match="with every_n_secs=2 one process would stop before the others"):
            tfmp.LossScaleLoggingHook(manager, every_n_secs=2, on_stuck="raise").begin()


def _history(*norms: float, spikes: tuple[int, ...] = (), applied: int | None = None) -> NormHistory:
    """Return a history of every tenth step; `spikes` are positions, at one of which the step was `applied` anyhow."""
    history = NormHistory()
    for index, norm in enumerate(norms):
        finite, step = math.isfinite(norm), 10 * (index + 1)
        is_applied = finite and (index not in spikes or index == applied)
        status = LossScaleStatus(8.0, is_applied, finite, step, step, 0, 0)
        history._add(norm, status, sum(spike <= index for spike in spikes))
    return history


def test_norms_are_lists_of_plain_numbers_of_each_step_once() -> None:
    history, empty = _history(1.0, 800.0, 2.0, spikes=(1,)), NormHistory()
    # The last step, which was seen already, and one before any step.
    history._add(3.0, _status(8.0, 0, 30), 0)
    empty._add(math.nan, _status(8.0, 0, 0), 0)
    assert empty.to_dict()["step"] == []
    found = history.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found == {"step": [10, 20, 30], "gradient_norm": [1, 800, 2], "skipped_spikes": [0, 1, 1]}
    # What is returned is a copy.
    found["step"].append(40)
    assert history.to_dict()["step"] == [10, 20, 30]


_MARKS = ("skipped as a spike", "overflow")


@pytest.mark.parametrize(
    ("history", "marked"),
    [
        pytest.param(_history(1.0, 800.0, 2.0, spikes=(1,)), _MARKS[:1], id="spike"),
        pytest.param(_history(1.0, math.inf, 800.0, 2.0, spikes=(2,)), _MARKS, id="both"),
        pytest.param(_history(math.inf), _MARKS[1:], id="overflow alone"),
        pytest.param(_history(1.0, 1.0, spikes=(1,), applied=1), (), id="spike between two looks"),
        pytest.param(_history(0.0), (), id="zero"),
    ],
)
def test_plot_marks_spikes_and_overflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: NormHistory, marked: tuple[str, ...]
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    # Letters stay letters.
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    history.plot(str(tmp_path / "norms.svg"))
    text = (tmp_path / "norms.svg").read_text()
    assert [mark for mark in (*_MARKS, "attempted step", "gradient norm") if mark in text] == [
        *marked,
        "attempted step",
        "gradient norm",
    ]


def test_buckets_of_a_histogram_reach_from_the_lowest_exponent_to_the_highest() -> None:
    found = summaries.buckets(tfmp.ranges.RangeHistogram.of(tf.constant([2.0**-150, 2.0**127], tf.float64)))
    assert found[:, 2].sum() == 2
    assert found[[0, -1]].tolist() == [[-150, -149, 1], [127, 128, 1]]
    assert found[1:, 0].tolist() == found[:-1, 1].tolist()
