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
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.monitoring.norm_history import NormHistory
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


def test_report_says_what_was_not_done_and_what_remains() -> None:
    report = _report(bfloat16_needs_scaling=True, already_float32=["norm"])
    assert (report.keep_float32, report.far_off, report.remaining) == (["dense"], ["head"], ["dense"])
    sentences = {"bfloat16 also needs a loss scale.", "In float32 already: norm; what remains is dense."}
    assert sentences <= set(str(report).splitlines())


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


def test_shares_without_gradients_are_0_and_the_history_returns_copies() -> None:
    kinds = {"weights": {"kernel": _histogram({"0": 1})}, "activations": {"relu": _histogram({"60": 1})}}
    assert RangeRecording(1, 8.0, kinds).shares == tfmp.ranges.RangeShares(*[0.0] * 6)
    history = _history(_recording(10, 2.0, {"-40": 1}))
    history.to_dict()["step"].append(30)
    assert history.to_dict()["step"] == [10]


def _history(*recordings: RangeRecording) -> RangeHistory:
    history = RangeHistory()
    for each in recordings:
        history._add(each)
    return history


_WIDE = _histogram({"-150": 1, "127": 1, "0": 1, "above": 1, "below": 1, "infinite": 1, "nan": 1})
_KINDS = {"weights": {"kernel": _WIDE, "$bias_1": _histogram({"nan": 1})}, "activation_gradients": {}}


def _norms(path: Any) -> None:
    history = NormHistory()
    history._add(1.0, LossScaleStatus(8.0, True, True, 10, 10, 0, 0), 0)
    history.plot(path)


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
    "norms": _norms,
    # It shows the course alone.
    "gradients of 0": lambda path: _history(_recording(1, 8.0, {"zero": 2})).plot(path),
}


_FORMATS = {"svg": b"<?xml", "png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF"}


@pytest.mark.parametrize(
    ("picture", "suffix"),
    [("report", "png"), ("history", "pdf"), ("norms", "png"), *((each, "svg") for each in _PICTURES)],
)
def test_picture_is_drawn_in_the_format_of_the_suffix(tmp_path: Path, picture: str, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"ranges.{suffix}"
    # The first drawing of a process may look for fonts and say so.
    _PICTURES[picture](str(path) if suffix == "svg" else path)
    assert path.read_bytes().startswith(_FORMATS[suffix])
    with pytest.raises(OSError, match="No such file or directory"):
        _PICTURES[picture](tmp_path / "missing" / "ranges.png")


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
        (lambda path: NormHistory().plot(path), ValueError, "there is nothing to draw yet: no norm was seen"),
        (lambda path: _report().plot(path, 0), ValueError, "loss_scale must be greater than 0, got 0"),
    ],
)
def test_what_cannot_be_written_is_an_error(tmp_path: Path, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("picture", ["report", "history", "norms"])
def test_without_matplotlib_the_extra_that_brings_it_is_named(
    picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"the package 'matplotlib.*'.*its extra, 'tfmp\[plot\]'"):
        _PICTURES[picture](tmp_path / "ranges.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("progress", ["bar", "lines", "nothing"])
def test_progress_is_a_bar_on_stderr_or_lines_of_the_log_or_nothing(
    progress: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if progress == "bar":
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    w, settings = tf.Variable(2.0), {"progress": progress != "nothing"}
    with caplog.at_level(logging.INFO, "tfmp"):
        tfmp.check_precision(lambda x: x * w, None, [tf.ones([2])] * 3, in_float16=lambda x: x * w, **settings)
    shown, precisions = capsys.readouterr(), ("float32", "float16")
    lines = [f"check_precision: 3 batches in {precision}" for precision in precisions]
    assert caplog.messages == (lines if progress == "lines" else [])
    assert shown.out == ""
    if progress == "bar":
        assert all(f"check_precision, {precision}:" in shown.err for precision in precisions)
        assert "3/3" in shown.err or "/3 [" in shown.err
    else:
        assert shown.err == ""
