"""What is said of overflows and spikes, each once, and how norms and ranges are stored and drawn."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.core.overflow.overflow_counts import OverflowReport
from tfmp.core.spikes.reports import SpikeReport
from tfmp.monitoring import summaries
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.overflow_messages import OverflowMessages, last_overflow_sentence, overflow_table
from tfmp.monitoring.spike_messages import SpikeMessages


def _overflows(name: str, nans: int, steps: int) -> OverflowReport:
    return OverflowReport([name], np.array([[0, nans, 0]]), np.array([steps]))


def test_only_overflows_since_the_start_are_named_and_each_once() -> None:
    at_start = _overflows("generator", 1, 3)
    messages = OverflowMessages([at_start])
    assert messages.new_overflows([at_start]) == []
    # A report that is new since the start: all of its overflows count.
    reports = [at_start, _overflows("discriminator", 2, 1)]
    assert messages.new_overflows(reports) == ["overflow in discriminator: 2 nan"]
    reports[0] = _overflows("generator", 4, 5)
    assert messages.new_overflows(reports) == ["overflow in generator: 4 nan"]
    assert [table.splitlines()[-1] for table in messages.summary_tables(reports)] == [
        "generator              2  4 nan",
        "discriminator              1  2 nan",
    ]


def test_largest_counts_are_named_first_and_the_rest_counted() -> None:
    names, steps = [f"layer_{index}" for index in range(30)], np.arange(30)
    last = np.zeros([30, 3], np.int64)
    assert last_overflow_sentence(names, last) is None
    assert overflow_table(names, last, 0 * steps) is None
    last[:6] = [[0, 1, 0], [0, 0, 0], [3, 1, 0], [0, 0, 12], [1, 0, 0], [0, 2, 2]]
    assert last_overflow_sentence(names, last, at_most=3) == (
        "overflow in layer_3: 12 saturated; layer_2: 3 inf, 1 nan; layer_5: 2 nan, 2 saturated; and 2 more"
    )
    last[29] = [0, 7, 0]
    rows = str(overflow_table(names, last, steps)).splitlines()
    assert rows[:3] == [
        "variable  skipped steps  at the last one",
        "layer_29             29  7 nan",
        "layer_28             28",
    ]
    assert rows[20:] == ["layer_10             10", "and 9 more"]


def _spikes(spikes: int, *shares: float) -> SpikeReport:
    names = [f"layer_{index}" for index in range(len(shares))]
    return SpikeReport(names, *map(np.array, (shares, 123456.0, 8.25, spikes)))


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
    assert SpikeMessages().new_spikes([_spikes(3, *shares)]) == [
        f"spike: gradient norm 1.235e+05 above the bound 8.25, from {named}; 3 skipped so far"
    ]


def test_only_new_spikes_and_changes_are_told() -> None:
    old, none = _spikes(2, 1.0), _spikes(0, 0.0)
    messages = SpikeMessages([old], lasting_changes=1)
    assert messages.new_spikes([old]) == []
    # A report that is new since the start, without a spike at first.
    assert messages.new_spikes([old, none]) == []
    (sentence,) = messages.new_spikes([old, _spikes(1, 0.5, 0.5)])
    assert sentence.endswith("from layer_0 (50 %), layer_1 (50 %); 1 skipped so far")
    (sentence,) = messages.new_spikes([_spikes(3, 1.0), _spikes(1, 0.5, 0.5)])
    assert sentence.endswith("from layer_0 (100 %); 3 skipped so far")
    assert [len(messages.new_changes(changes, 10)) for changes in (1, 2, 2)] == [0, 1, 0]


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
    history = _history(1.0, 800.0, 2.0, spikes=(1,))
    status = LossScaleStatus(8.0, True, True, 30, 30, 0, 0)
    # The last step, which was seen already, and one before any step.
    history._add(3.0, status, 0)
    empty = NormHistory()
    empty._add(math.nan, status._replace(attempted_steps=0), 0)
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
        pytest.param(_history(1.0, 2.0, 3.0), (), id="plain"),
        pytest.param(_history(1.0, 800.0, 2.0, spikes=(1,)), _MARKS[:1], id="spike"),
        pytest.param(_history(1.0, math.inf, math.nan, 2.0), _MARKS[1:], id="overflow"),
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
    assert [mark for mark in _MARKS if mark in text] == list(marked)
    assert "attempted step" in text
    assert "gradient norm" in text
    history.plot(tmp_path / "norms.png")
    assert (tmp_path / "norms.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_without_norms_or_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is nothing to draw yet: no norm was seen"):
        NormHistory().plot(tmp_path / "norms.png")
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"the package 'matplotlib.*' here.*its extra, 'tfmp\[plot\]'"):
        _history(1.0).plot(tmp_path / "norms.png")
    assert list(tmp_path.iterdir()) == []


def test_buckets_of_a_histogram_reach_from_the_lowest_exponent_to_the_highest() -> None:
    found = summaries.buckets(tfmp.ranges.RangeHistogram.of(tf.constant([2.0**-150, 2.0**127], tf.float64)))
    assert found[:, 2].sum() == 2
    assert found[[0, -1]].tolist() == [[-150, -149, 1], [127, 128, 1]]
    assert found[1:, 0].tolist() == found[:-1, 1].tolist()
