"""The report of check_precision: its table, its data, its picture, and the progress until then."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp

_histogram = tfmp.ranges.RangeHistogram.from_dict
_NOTHING = tfmp.ranges.RangeHistogram()


def _report(**fields: Any) -> tfmp.ranges.PrecisionReport:
    layers = [
        tfmp.ranges.LayerPrecision(
            name="embedding",
            activations=_histogram({"-3": 4}),
            largest_activation=0.1875,
            activation_gradients=_NOTHING,
            weights=_NOTHING,
            weight_gradients=_NOTHING,
        ),
        tfmp.ranges.LayerPrecision(
            name="dense",
            activations=_histogram({"2": 4}),
            largest_activation=1234567.0,
            activation_gradients=_histogram({"-30": 4, "-20": 3, "zero": 2}),
            weights=_histogram({"0": 1}),
            weight_gradients=_histogram({"1": 1}),
            keep_float32="its activations reach 1.23e+06, and float16 ends at 65504",
            cosine=1.0,
            relative_error=0.00012,
        ),
        tfmp.ranges.LayerPrecision(
            name="head",
            activations=_NOTHING,
            largest_activation=0.0,
            activation_gradients=_NOTHING,
            weights=_NOTHING,
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


_TABLE = """\
layer      largest   gradients   zero   lost  subnormal  lost x2048    error
---------  -------  ----------  -----  -----  ---------  ----------  -------  ---------------
embedding    0.188
dense     1.23e+06  2^-30..2^1  20.0%  40.0%      30.0%        0.0%  1.2e-04  keep in float32
head                2^-3..2^-3   0.0%   0.0%       0.0%        0.0%      inf  far off
"""


def test_table_has_a_line_for_each_layer() -> None:
    table, empty, *_ = str(_report()).partition("\n\n")
    lines = [line.split() for line in table.splitlines()]
    expected = [line.split() for line in _TABLE.splitlines()]
    assert (lines[0], lines[2:], empty) == (expected[0], expected[2:], "\n\n")
    rows = table.splitlines()
    # Numbers stand below each other, and the last column begins at one place.
    assert rows[2].index("0.188") + len("0.188") == rows[3].index("1.23e+06") + len("1.23e+06")
    assert rows[3].index("keep in float32") == rows[4].index("far off")
    assert rows[3].index("1.2e-04") + len("1.2e-04") == rows[4].index("inf") + len("inf")


def test_sentences_below_the_table_say_what_follows() -> None:
    assert str(_report()).partition("\n\n")[2].splitlines() == [
        "Suggested loss scale: 2048. Without scaling, float16 loses 20.0% of all gradients and keeps 15.0% with fewer "
        "bits; with it, 0.0% and 20.0%.",
        "Keep dense in float32: its activations reach 1.23e+06, and float16 ends at 65504.",
        "head is far off in float16: its gradients overflow.",
        "Loss: 1.5 in float32, 1.5 in float16.",
        "bfloat16 needs no loss scale.",
    ]


def test_sentences_name_what_was_not_done_and_what_is_needed() -> None:
    sentences = str(_report(float16_loss=None, bfloat16_needs_scaling=True)).splitlines()[-2:]
    assert sentences == [
        "The model was not run in float16: pass in_float16 to compare its gradients.",
        "bfloat16 also needs a loss scale.",
    ]


def test_lists_are_of_layers_with_a_reason() -> None:
    assert (_report().keep_float32, _report().far_off) == (["dense"], ["head"])


def test_gradients_of_a_layer_are_those_of_activations_and_of_weights() -> None:
    assert _report()["dense"].gradients.to_dict() == {"-30": 4, "-20": 3, "1": 1, "zero": 2}


def test_layer_is_found_by_its_name() -> None:
    report = _report()
    assert report["head"] is report.layers[2]
    with pytest.raises(KeyError, match=r"no layer 'tail': the report has embedding, dense, head\."):
        report["tail"]


@pytest.mark.parametrize(
    ("already", "remaining", "sentence"),
    [
        (["norm"], ["dense"], "In float32 already: norm; what remains is dense."),
        (["norm", "dense"], [], "In float32 already: norm, dense; nothing else must be."),
    ],
    ids=["remains", "confirmed"],
)
def test_what_is_in_float32_already_does_not_remain(already: list[str], remaining: list[str], sentence: str) -> None:
    report = _report(already_float32=already)
    assert (report.keep_float32, report.remaining) == (["dense"], remaining)
    assert sentence in str(report).splitlines()


def test_data_hold_all_that_json_can_hold() -> None:
    report = _report(float16_loss=math.nan)
    data = report.to_dict()
    assert json.loads(report.to_json()) == data == json.loads(json.dumps(data))
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
    found = tfmp.ranges.RangeHistogram.from_dict(json.loads(report.to_json())["layers"][1]["activation_gradients"])
    assert found == report["dense"].activation_gradients


def test_json_is_also_written_to_a_file(tmp_path: Path) -> None:
    report = _report()
    assert report.to_json(tmp_path / "report.json") == report.to_json()
    assert (tmp_path / "report.json").read_text() == report.to_json() + "\n"
    assert report.to_json(str(tmp_path / "again.json")) == (tmp_path / "again.json").read_text()[:-1]


def test_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        _report().to_json(tmp_path / "missing" / "report.json")


# The first drawing of a process may look for fonts and say so.
@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
@pytest.mark.parametrize("loss_scale", [None, 1.0])
def test_picture_is_drawn_in_the_format_of_the_suffix(
    tmp_path: Path, suffix: str, begins: bytes, loss_scale: float | None
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"report.{suffix}"
    _report().plot(path, loss_scale)
    assert path.read_bytes().startswith(begins)


def test_picture_shows_layers_and_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    # Letters stay letters.
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    _report().plot(str(tmp_path / "report.svg"), loss_scale=512)
    text = (tmp_path / "report.svg").read_text()
    assert all(shown in text for shown in ("embedding", "dense (20% zeros)", "head", "gradients, loss scale 512"))
    _report().plot(tmp_path / "suggested.svg")
    assert "gradients, loss scale 2048" in (tmp_path / "suggested.svg").read_text()


def test_picture_leaves_out_what_has_no_values(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _report(layers=_report().layers[2:]).plot(tmp_path / "gradients_only.png")
    assert (tmp_path / "gradients_only.png").stat().st_size > 1000


def test_picture_holds_values_far_beyond_float16(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wide = _histogram({"-150": 1, "127": 1, "0": 1, "above": 1, "below": 1, "infinite": 1, "nan": 1})
    layer = tfmp.ranges.LayerPrecision(
        name="wide",
        activations=wide,
        largest_activation=math.inf,
        activation_gradients=wide,
        weights=wide,
        weight_gradients=wide,
    )
    for scale in (1.0, 2.0**96):
        _report(layers=[layer]).plot(tmp_path / f"{scale:g}.png", scale)
        assert (tmp_path / f"{scale:g}.png").stat().st_size > 1000


def test_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(OSError, match="No such file or directory"):
        _report().plot(tmp_path / "missing" / "report.png")


def test_without_matplotlib_the_extra_that_brings_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"needs the package 'matplotlib'.*its extra, 'tfmp\[plot\]'"):
        _report().plot(tmp_path / "report.png")
    assert not (tmp_path / "report.png").exists()


def _check(**settings: Any) -> None:
    w = tf.Variable(2.0)
    tfmp.check_precision(lambda x: x * w, None, [tf.ones([2])] * 3, in_float16=lambda x: x * w, **settings)


def test_progress_is_a_bar_on_stderr(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tqdm")
    with caplog.at_level(logging.INFO, "tfmp"):
        _check()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(f"check_precision, {precision}:" in shown.err for precision in ("float32", "float16"))
    assert ("3/3" in shown.err or "/3 [" in shown.err, caplog.messages) == (True, [])


def test_without_tqdm_progress_is_lines_of_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with caplog.at_level(logging.INFO, "tfmp"):
        _check()
    assert caplog.messages == [f"check_precision: 3 batches in {precision}" for precision in ("float32", "float16")]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("hidden", [True, False])
def test_no_progress_shows_nothing(
    hidden: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hidden:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with caplog.at_level(logging.DEBUG, "tfmp"):
        _check(progress=False)
    assert (capsys.readouterr(), caplog.messages) == (("", ""), [])


def test_loss_scale_of_a_picture_must_be_positive(tmp_path: Any) -> None:
    w = tf.Variable(2.0)
    with pytest.raises(ValueError, match="loss_scale must be greater than 0, got 0"):
        tfmp.check_precision(lambda x: x * w, None, [tf.ones([2])], progress=False).plot(tmp_path / "a.png", 0)


def test_no_line_of_the_table_ends_in_blanks() -> None:
    w = tf.Variable(2.0)
    lines = str(tfmp.check_precision(lambda x: x * w, None, [tf.ones([2])], progress=False)).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
