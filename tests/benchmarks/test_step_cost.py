"""The benchmark of steps in Keras, on tiny weights."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import step_cost
from benchmarks.harness import keras_contenders

_only_keras_3 = pytest.mark.skipif(keras_contenders.KERAS != "Keras 3", reason="compares Keras 3 with tf_keras")

_TINY = ["--shapes", "tiny", "--optimizers", "Adam", "--rounds", "2"]
_CONTENDERS = {"copy", "read", "bare", "Keras 3", "tfmp", "GradScaler", "tf_keras", "tfmp, tf_keras"}


@_only_keras_3
def test_all_contenders_take_good_steps_and_skipped_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    modes = ["--modes", "function", "eager"]
    assert step_cost.main([*_TINY, *modes, "--outcomes", "good", "skipped", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert [(each["mode"], each["outcome"], each["steps_checked"]) for each in figures] == [
        ("function", "good", True),
        ("function", "skipped", True),
        ("eager", "good", True),
        ("eager", "skipped", True),
    ]
    for figure in figures:
        expected = _CONTENDERS | ({"bare, compiled"} if figure["mode"] == "function" else set())
        assert figure["turns"].keys() == figure["first_calls"].keys() == figure["peak_memory"].keys() == expected
        assert all(len(turns) == 2 for turns in figure["turns"].values())
    printed = capsys.readouterr().out
    assert "tiny, eager, Adam, skipped (cell 4 of 4)" in printed
    assert "| tfmp, tf_keras |" in printed
    assert printed.count("cost of wrapping:") == 1


@_only_keras_3
def test_short_form_measures_its_own_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--short", "--shapes", "small", "--modes", "function", "--rounds", "2"]
    assert step_cost.main([*short, "--optimizers", "Adam"]) == 0
    printed = capsys.readouterr().out
    assert "small, function, Adam, skipped (cell 2 of 2)" in printed
    names = ("copy", "bare", "bare, compiled", "Keras 3", "tfmp", "GradScaler", "tf_keras")
    assert [printed.count(f"\n| {name:10} |") for name in names] == [0, 2, 0, 2, 2, 2, 0]
    row = next(line for line in printed.splitlines() if line.startswith("| small, Adam, skipped |"))
    assert row.split("|")[6].strip() == ""
    assert re.fullmatch(r" \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\) +", row.split("|")[7])


@pytest.mark.home("tf215")
@pytest.mark.skipif(keras_contenders.KERAS != "Keras 2", reason="Keras 3 has no legacy optimizers")
@pytest.mark.parametrize("mode", ["function", "eager", "replicas"])
def test_legacy_optimizers_take_good_steps_and_skipped_ones(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--shapes", "tiny", "--rounds", "2", "--modes", mode]
    assert step_cost.main([*tiny, "--outcomes", "good", "skipped"]) == 0
    printed = capsys.readouterr().out
    names = ("bare ", "bare, compiled ", "Keras 2 ", "tfmp ", "GradScaler ")
    assert [printed.count(f"\n| {name}") for name in names] == [4, 4 if mode == "function" else 0, 4, 4, 4]


@pytest.mark.home("tf215")
@pytest.mark.skipif(keras_contenders.KERAS != "Keras 2", reason="Keras 3 has no legacy optimizers")
def test_legacy_optimizers_refuse_float16(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--shapes", "tiny", "--rounds", "2"]
    with pytest.raises(SystemExit):
        step_cost.main([*tiny, "--dtypes", "float16"])
    assert "legacy optimizers take no float16 gradients" in capsys.readouterr().err


@_only_keras_3
def test_replicas_take_the_same_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert step_cost.main([*_TINY, "--modes", "replicas", "--clip", "clipped", "unclipped"]) == 0
    printed = capsys.readouterr().out
    assert [printed.count(f"\n| {name} ") for name in ("GradScaler", "tfmp, tf_keras")] == [2, 1]
    assert "left out: tf_keras: its optimizers clip the sums over the replicas" in printed


@_only_keras_3
def test_contenders_that_are_left_out_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert step_cost.main([*_TINY, "--modes", "eager", "--dtypes", "float16"]) == 0
    assert "left out: tf_keras: its optimizers take no float16 gradients" in capsys.readouterr().out


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures.png"
    options = ["--modes", "eager", "--clip", "clipped", "--rounds", "2", "--plot", str(path)]
    assert step_cost.main(["--shapes", "tiny", "--optimizers", keras_contenders.OPTIMIZERS[-1], *options]) == 0
    assert path.stat().st_size > 0
