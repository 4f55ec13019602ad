"""The report of check_precision and the history of recordings: tables, data, pictures, and the progress until then."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.ranges import RangeHistory, RangeRecording

_histogram = tfmp.ranges.RangeHistogram.from_dict
_NOTHING = tfmp.ranges.RangeHistogram()


def _layer(name: str, **fields: Any) -> tfmp.ranges.LayerPrecision:
    kinds = ("activations", "activation_gradients", "weights", "weight_gradients")
    return tfmp.ranges.LayerPrecision(
        name=name, **{"largest_activation": 0.0, **dict.fromkeys(kinds, _NOTHING)} | fields
    )


def _report(**fields: Any) -> tfmp.ranges.PrecisionReport:
    layers = [
        _layer("embedding", activations=_histogram({"-3": 4}), largest_activation=0.1875),
        _layer(
            "dense",
            activations=_histogram({"2": 4}),
            largest_activation=1234567.0,
            activation_gradients=_histogram({"-30": 4, "-20": 3, "zero": 2}),
            weights=_histogram({"0": 1}),
            weight_gradients=_histogram({"1": 1}),
            keep_float32="its activations reach 1.23e+06, and float16 ends at 65504",
            cosine=1.0,
            relative_error=0.00012,
        ),
        _layer(
            "head",
            weight_gradients=_histogram({"-3": 10}),
            cosine=math.nan,
            relative_error=math.inf,
            far_off="its gradients overflow",
        ),
    ]
    values = {
        "layers": layers,
        "suggested_loss_scale": 2048.0,
        "bfloat16_needs_scaling": False,
        "batches": 2,
        "loss": 1.5,
        "float16_loss": 1.4999999,
    }
    return tfmp.ranges.PrecisionReport(**values | fields)


_SHOWN = """\
layer       largest   gradients   zero   lost  subnormal  lost x2048    error
---------  --------  ----------  -----  -----  ---------  ----------  -------  ---------------
embedding     0.188
dense      1.23e+06  2^-30..2^1  20.0%  40.0%      30.0%        0.0%  1.2e-04  keep in float32
head                 2^-3..2^-3   0.0%   0.0%       0.0%        0.0%      inf  far off

Suggested loss scale: 2048. Without scaling, float16 loses 20.0% of all gradients and keeps 15.0% with fewer bits; \
with it, 0.0% and 20.0%.
Keep dense in float32: its activations reach 1.23e+06, and float16 ends at 65504.
head is far off in float16: its gradients overflow.
Loss: 1.5 in float32, 1.5 in float16.
bfloat16 needs no loss scale."""


def test_report_is_a_table_of_layers_and_says_what_follows() -> None:
    assert str(_report()) == _SHOWN


@pytest.mark.parametrize(
    ("fields", "remaining", "sentences"),
    [
        (
            {"float16_loss": None, "bfloat16_needs_scaling": True},
            ["dense"],
            [
                "The model was not run in float16: pass in_float16 to compare its gradients.",
                "bfloat16 also needs a loss scale.",
            ],
        ),
        ({"already_float32": ["norm"]}, ["dense"], ["In float32 already: norm; what remains is dense."]),
        ({"already_float32": ["norm", "dense"]}, [], ["In float32 already: norm, dense; nothing else must be."]),
    ],
)
def test_report_says_what_was_not_done_and_what_remains(
    fields: dict[str, Any], remaining: list[str], sentences: list[str]
) -> None:
    report = _report(**fields)
    assert (report.keep_float32, report.far_off, report.remaining) == (["dense"], ["head"], remaining)
    assert set(sentences) <= set(str(report).splitlines())


def test_layer_is_found_by_its_name() -> None:
    report = _report()
    assert report["head"] is report.layers[2]
    # Of activations and of weights.
    assert report["dense"].gradients.to_dict() == {"-30": 4, "-20": 3, "1": 1, "zero": 2}
    with pytest.raises(KeyError, match=r"no layer 'tail': the report has embedding, dense, head\."):
        report["tail"]


def test_data_hold_all_that_json_can_hold(tmp_path: Path) -> None:
    report = _report(float16_loss=math.nan)
    data, path = report.to_dict(), tmp_path / "report.json"
    assert json.loads(report.to_json(path)) == data == json.loads(json.dumps(data))
    assert path.read_text() == report.to_json() + "\n"
    assert [data[name] for name in ("suggested_loss_scale", "batches", "loss", "float16_loss")] == [2048, 2, 1.5, "nan"]
    assert (data["keep_float32"], data["far_off"], data["bfloat16_needs_scaling"]) == (["dense"], ["head"], False)
    assert (data["already_float32"], data["remaining"]) == ([], ["dense"])
    assert data["layers"][1] == {
        "name": "dense",
        "activations": {"2": 4},
        "largest_activation": 1234567.0,
        "activation_gradients": {"-30": 4, "-20": 3, "zero": 2},
        "weights": {"0": 1},
        "weight_gradients": {"1": 1},
        "keep_float32": "its activations reach 1.23e+06, and float16 ends at 65504",
        "cosine": 1.0,
        "relative_error": 0.00012,
        "far_off": None,
    }
    assert (data["layers"][2]["cosine"], data["layers"][2]["relative_error"]) == ("nan", "inf")


def _recording(step: int, loss_scale: float, gradients: dict[str, int], **kinds: Any) -> RangeRecording:
    return RangeRecording(step, loss_scale, {"gradients": {"kernel": _histogram(gradients)}, **kinds})


def test_shares_of_a_recording_are_of_all_gradients_at_the_loss_scale() -> None:
    kinds = {
        "gradients": {"kernel": _histogram({"-30": 1, "zero": 1}), "bias": _histogram({"0": 1})},
        "activation_gradients": {"relu": _histogram({"-28": 1, "-20": 1, "20": 1, "nan": 1, "zero": 1})},
        "weights": {"kernel": _histogram({"-60": 1})},
        "activations": {"relu": _histogram({"60": 1})},
    }
    recording = RangeRecording(7, 4.0, kinds)
    assert recording.shares == tfmp.ranges.RangeShares(
        zero=2 / 8, lost=2 / 8, subnormal=1 / 8, normal=1 / 8, overflow=1 / 8, nonfinite=1 / 8
    )
    assert recording.scalars() == {"gradients_zero": 0.25, "gradients_lost": 0.25, "gradients_subnormal": 0.125}
    assert dict(recording.tagged()) == {f"{kind}/{name}": kinds[kind][name] for kind in kinds for name in kinds[kind]}
    without = RangeRecording(1, 8.0, {"weights": {"kernel": _histogram({"0": 1})}})
    assert without.shares == tfmp.ranges.RangeShares(*[0.0] * 6)


def test_history_keeps_the_shares_of_all_looks_and_the_last_recording() -> None:
    history, names = RangeHistory(), tfmp.ranges.RangeShares._fields
    empty: Any = {"step": [], "loss_scale": [], **{f"gradients_{name}": [] for name in names}}
    assert (history.last, history.to_dict()) == (None, empty)
    recordings = [
        _recording(10, 2.0, {"zero": 1, "-40": 1}),
        _recording(20, 2.0**20, {"-40": 1, "0": 1}),
        _recording(25, 2.0**16, {"0": 1, "infinite": 1}),
    ]
    for recording in recordings:
        history._add(recording)
    assert history.last is recordings[-1]
    found = history.to_dict()
    assert json.loads(json.dumps(found)) == found
    shares = {f"gradients_{name}": [getattr(each.shares, name) for each in recordings] for name in names}
    assert found == {"step": [10, 20, 25], "loss_scale": [2, 2.0**20, 2.0**16], **shares}
    assert (found["gradients_subnormal"], found["gradients_overflow"]) == ([0, 0.5, 0], [0, 0.5, 0.5])
    # What is returned is a copy.
    found["step"].append(30)
    assert history.to_dict()["step"] == [10, 20, 25]


def _history(*recordings: RangeRecording) -> RangeHistory:
    history = RangeHistory()
    for each in recordings:
        history._add(each)
    return history


_WIDE = _histogram({"-150": 1, "127": 1, "0": 1, "above": 1, "below": 1, "infinite": 1, "nan": 1})
_KINDS = {"weights": {"kernel": _WIDE, "$bias_1": _histogram({"nan": 1})}, "activation_gradients": {}}

#: What draws itself to a path.
_PICTURES: dict[str, Any] = {
    "report": lambda path: _report().plot(path),
    "report without scaling": lambda path: _report().plot(path, 1.0),
    "report of gradients alone": lambda path: _report(layers=_report().layers[2:]).plot(path),
    "far beyond float16": lambda path: _report(
        layers=[_layer("wide", activations=_WIDE, activation_gradients=_WIDE)]
    ).plot(path, 2.0**96),
    "history": lambda path: _history(_recording(1, 8.0, {"0": 1}, **_KINDS)).plot(path),
    "history of steps": lambda path: _history(*(_recording(s, 2.0**s, {"-40": 1}) for s in range(3))).plot(path),
    # It shows the course alone.
    "gradients of 0": lambda path: _history(_recording(1, 8.0, {"zero": 2})).plot(path),
}


@pytest.mark.parametrize("draw", _PICTURES.values(), ids=_PICTURES)
def test_picture_is_drawn_in_the_format_of_the_suffix(tmp_path: Path, draw: Any) -> None:
    pytest.importorskip("matplotlib")
    for suffix, begins in (("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        path = tmp_path / f"ranges.{suffix}"
        # The first drawing of a process may look for fonts and say so.
        draw(str(path) if suffix == "svg" else path)
        assert path.read_bytes().startswith(begins)
    with pytest.raises(OSError, match="No such file or directory"):
        draw(tmp_path / "missing" / "ranges.png")


def test_picture_shows_layers_and_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    # Letters stay letters.
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    _report().plot(tmp_path / "report.svg", loss_scale=512)
    text = (tmp_path / "report.svg").read_text()
    assert all(shown in text for shown in ("embedding", "dense (20% zeros)", "head", "gradients, loss scale 512"))
    _report().plot(tmp_path / "suggested.svg")
    assert "gradients, loss scale 2048" in (tmp_path / "suggested.svg").read_text()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda path: _report().to_json(path / "report.json"), OSError, "No such file or directory"),
        (lambda path: RangeHistory().plot(path), ValueError, "there is nothing to draw yet: no step was looked at"),
        (lambda path: _report().plot(path, 0), ValueError, "loss_scale must be greater than 0, got 0"),
    ],
)
def test_what_cannot_be_written_is_an_error(tmp_path: Path, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("picture", ["report", "history"])
def test_without_matplotlib_the_extra_that_brings_it_is_named(
    picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"the package 'matplotlib.*'.*its extra, 'tfmp\[plot\]'"):
        _PICTURES[picture](tmp_path / "ranges.png")
    assert not list(tmp_path.iterdir())


def _check(**settings: Any) -> None:
    w = tf.Variable(2.0)
    tfmp.check_precision(lambda x: x * w, None, [tf.ones([2])] * 3, in_float16=lambda x: x * w, **settings)


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("has_tqdm", [True, False])
def test_progress_is_a_bar_on_stderr_or_lines_of_the_log_or_nothing(
    progress: bool,
    has_tqdm: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if has_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with caplog.at_level(logging.INFO, "tfmp"):
        _check(progress=progress)
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [f"check_precision: 3 batches in {precision}" for precision in ("float32", "float16")]
    assert caplog.messages == (lines if progress and not has_tqdm else [])
    if progress and has_tqdm:
        assert all(f"check_precision, {precision}:" in shown.err for precision in ("float32", "float16"))
        assert "3/3" in shown.err or "/3 [" in shown.err
    else:
        assert shown.err == ""
