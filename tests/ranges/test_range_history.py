"""The history of recorded ranges: as plain data, and as a picture."""

import json
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import tfmp
from tfmp.ranges import RangeHistory, RangeRecording


def _of(*values: float) -> tfmp.ranges.RangeHistogram:
    return tfmp.ranges.RangeHistogram.of(tf.constant(values))


def _recording(step: int, loss_scale: float, *gradients: float) -> RangeRecording:
    return RangeRecording(step, loss_scale, {"gradients": {"kernel": _of(*gradients)}})


def test_shares_are_of_all_gradients_at_the_loss_scale() -> None:
    kinds = {
        "gradients": {"kernel": _of(2.0**-30, 0.0), "bias": _of(1.0)},
        "activation_gradients": {"relu": _of(2.0**-28, 2.0**-20, 2.0**20, float("nan"), 0.0)},
        "weights": {"kernel": _of(2.0**-60)},
        "activations": {"relu": _of(2.0**60)},
    }
    recording = RangeRecording(7, 4.0, kinds)
    assert recording.shares == tfmp.ranges.RangeShares(
        zero=2 / 8, lost=2 / 8, subnormal=1 / 8, normal=1 / 8, overflow=1 / 8, nonfinite=1 / 8
    )
    assert recording.scalars() == {"gradients_zero": 0.25, "gradients_lost": 0.25, "gradients_subnormal": 0.125}
    assert dict(recording.tagged()) == {
        "gradients/kernel": _of(2.0**-30, 0.0),
        "gradients/bias": _of(1.0),
        "activation_gradients/relu": _of(2.0**-28, 2.0**-20, 2.0**20, float("nan"), 0.0),
        "weights/kernel": _of(2.0**-60),
        "activations/relu": _of(2.0**60),
    }


def test_recording_without_gradients_has_shares_of_0() -> None:
    assert RangeRecording(1, 8.0, {"weights": {"kernel": _of(1.0)}}).shares == tfmp.ranges.RangeShares(*[0.0] * 6)


def test_history_keeps_the_shares_of_all_looks_and_the_last_recording() -> None:
    history = RangeHistory()
    names = ["zero", "lost", "subnormal", "normal", "overflow", "nonfinite"]
    empty = {"step": [], "loss_scale": [], **{f"gradients_{name}": [] for name in names}}
    assert (history.last, history.to_dict()) == (None, empty)
    recordings = [
        _recording(10, 2.0, 0.0, 2.0**-40),
        _recording(20, 2.0**20, 2.0**-40, 1.0),
        _recording(25, 2.0**16, 1.0, float("inf")),
    ]
    for recording in recordings:
        history._add(recording)
    assert history.last is recordings[-1]
    found = history.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found == {
        "step": [10, 20, 25],
        "loss_scale": [2, 2.0**20, 2.0**16],
        "gradients_zero": [0.5, 0, 0],
        "gradients_lost": [0.5, 0, 0],
        "gradients_subnormal": [0, 0.5, 0],
        "gradients_normal": [0, 0, 0],
        "gradients_overflow": [0, 0.5, 0.5],
        "gradients_nonfinite": [0, 0, 0.5],
    }
    # What is returned is a copy.
    found["step"].append(30)
    assert history.to_dict()["step"] == [10, 20, 25]


@pytest.mark.parametrize("recordings", [1, 3])
def test_plot_writes_a_picture(recordings: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = RangeHistory()
    for step in range(recordings):
        kinds = {
            "gradients": {"kernel": _of(2.0**-40, 1.0, 0.0), "bias": _of(0.0)},
            "weights": {"kernel": _of(1.0, 2.0), "$bias_1": _of(float("nan"))},
            "activations": {"relu": _of(2.0**100, 2.0**-100, float("inf"))},
            "activation_gradients": {},
        }
        history._add(RangeRecording(10 * step, 2.0**step, kinds))
    path = tmp_path / "ranges.png"
    history.plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    history.plot(str(tmp_path / "ranges.svg"))
    assert (tmp_path / "ranges.svg").read_text().startswith("<?xml")


def test_plot_of_gradients_that_are_all_0_shows_the_course_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = RangeHistory()
    history._add(_recording(1, 8.0, 0.0, 0.0))
    path = tmp_path / "ranges.png"
    history.plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_before_the_first_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is nothing to draw yet: no step was looked at"):
        RangeHistory().plot(tmp_path / "ranges.png")
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = RangeHistory()
    history._add(_recording(1, 8.0, 1.0))
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"the package 'matplotlib.*' here.*its extra, 'tfmp\[plot\]'"):
        history.plot(tmp_path / "ranges.png")
