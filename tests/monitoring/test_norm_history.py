"""The history of the norms of gradients, as numbers and as a picture."""

import json
import math
import sys
from pathlib import Path

import pytest

from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.monitoring.norm_history import NormHistory


def _status(step: int, *, applied: bool, finite: bool) -> LossScaleStatus:
    return LossScaleStatus(
        loss_scale=8.0,
        last_step_applied=applied,
        last_step_finite=finite,
        attempted_steps=step,
        applied_steps=step,
        skipped_steps=0,
        consecutive_skipped_steps=0,
    )


def _history(*norms: float, spikes: tuple[int, ...] = (), every: int = 10) -> NormHistory:
    """Return a history with one norm for every so many steps; `spikes` are the positions of those that were skipped."""
    history = NormHistory()
    for index, norm in enumerate(norms):
        finite = math.isfinite(norm)
        status = _status(every * (index + 1), applied=finite and index not in spikes, finite=finite)
        history._add(norm, status, sum(spike <= index for spike in spikes))
    return history


def test_history_is_lists_of_plain_numbers() -> None:
    history = _history(1.0, 800.0, 2.0, spikes=(1,))
    found = history.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found == {"step": [10, 20, 30], "gradient_norm": [1, 800, 2], "skipped_spikes": [0, 1, 1]}
    # What is returned is a copy.
    found["step"].append(40)
    assert history.to_dict()["step"] == [10, 20, 30]


def test_only_steps_are_kept_and_each_once() -> None:
    history = NormHistory()
    for step, norm in ((0, math.nan), (1, 2.0), (1, 3.0), (2, 4.0)):
        history._add(norm, _status(step, applied=True, finite=True), 0)
    assert history.to_dict() == {"step": [1, 2], "gradient_norm": [2, 4], "skipped_spikes": [0, 0]}


_MARKS = ("skipped as a spike", "overflow")


@pytest.mark.parametrize(
    ("norms", "spikes", "marked"),
    [
        ((1.0, 2.0, 3.0), (), ()),
        ((1.0, 800.0, 2.0), (1,), _MARKS[:1]),
        ((1.0, math.inf, math.nan, 2.0), (), _MARKS[1:]),
        ((1.0, math.inf, 800.0, 2.0), (2,), _MARKS),
        ((math.inf,), (), _MARKS[1:]),
    ],
    ids=["plain", "spike", "overflow", "both", "overflow-alone"],
)
def test_plot_marks_spikes_and_overflows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    norms: tuple[float, ...],
    spikes: tuple[int, ...],
    marked: tuple[str, ...],
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    # Letters stay letters.
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    _history(*norms, spikes=spikes).plot(str(tmp_path / "norms.svg"))
    text = (tmp_path / "norms.svg").read_text()
    assert [mark for mark in _MARKS if mark in text] == list(marked)
    assert "attempted step" in text
    assert "gradient norm" in text


def test_plot_marks_no_later_step_for_a_spike_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    history = NormHistory()
    for step, spikes in ((100, 0), (200, 1)):
        history._add(1.0, _status(step, applied=True, finite=True), spikes)
    history.plot(tmp_path / "norms.svg")
    assert _MARKS[0] not in (tmp_path / "norms.svg").read_text()


@pytest.mark.parametrize("norms", [(1.0, 800.0, math.inf), (0.0,)])
def test_plot_writes_a_picture(tmp_path: Path, norms: tuple[float, ...]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "norms.png"
    _history(*norms, spikes=(1,)).plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_before_the_first_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is nothing to draw yet: no norm was seen"):
        NormHistory().plot(tmp_path / "norms.png")
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"the package 'matplotlib.*' here.*its extra, 'tfmp\[plot\]'"):
        _history(1.0).plot(tmp_path / "norms.png")
