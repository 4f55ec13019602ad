"""The benchmark of recipes, at sizes that take seconds; the tests do not look at its times and bytes."""

import json
from pathlib import Path

import keras
import pytest

pytest.importorskip("sklearn")

from benchmarks.recipes import __main__ as recipes
from benchmarks.recipes import bars, picture, results
from benchmarks.recipes.training import STATES, WAYS, Cell, Measured, Training, measure

pytestmark = pytest.mark.skipif(not keras.__version__.startswith("3."), reason="runs with Keras 3 only")


def _measured(accuracies: list[float], peak: int = 2**20) -> Measured:
    return {"accuracies": accuracies, "peak_bytes": [peak], "state_bytes": 1024, "step_seconds": [0.002]}


def _all_of(net: str, **accuracies: list[float]) -> results.Results:
    by_precision = {name.replace("_", "-"): values for name, values in accuracies.items()}
    return {
        Cell(net, precision, way, state): _measured(values)
        for precision, values in by_precision.items()
        for way in WAYS
        for state in STATES
    }


def test_a_process_measures_cells_that_are_drawn_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path, picture_path = tmp_path / "recipes.json", tmp_path / "recipes.png"
    chosen = ["--nets", "transformer", "--precisions", "float32", "--states", "float32"]
    chosen += ["--ways", "plain", "recomputation"]
    assert (
        recipes.main([*chosen, "--size", "tiny", "--seeds", "2", "--json", str(path), "--plot", str(picture_path)]) == 0
    )
    figures = json.loads(path.read_text())["figures"]
    assert [each["way"] for each in figures] == ["plain", "recomputation"]
    # Recomputation changes no step.
    assert figures[0]["accuracies"] == figures[1]["accuracies"]
    for each in figures:
        assert len(each["accuracies"]) == len(each["step_seconds"]) == 2
        assert min(each["peak_bytes"]) > each["state_bytes"] > 0
    printed = capsys.readouterr().out
    assert "transformer, float32, recomputation, float32 state (cell 2 of 2): " in printed
    assert "2 of 2 cells ran: that all run holds." in printed
    assert picture_path.read_bytes().startswith(b"\x89PNG")
    assert recipes.main(["--from-json", str(path)]) == 0
    assert capsys.readouterr().out.strip() in printed


@pytest.mark.parametrize("precision", ["float16-unscaled", "bfloat16"])
def test_each_precision_trains(precision: str) -> None:
    measured = measure(Cell("branched", precision, "both", "half"), "tiny", seeds=1)
    assert 0 <= measured["accuracies"][0] <= 100


def test_a_seed_trains_alike_again() -> None:
    training = Training(Cell("convolutional", "float16-tfmp", "accumulation", "float32"), "tiny")
    first, other, again = (training.run(seed).accuracy for seed in (0, 1, 0))
    assert first == again != other


def test_what_a_cell_raises_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    cell = Cell("branched", "float32", "plain", "float32")
    found: results.Results = {cell: {"error": "ValueError: no"}, cell._replace(way="both"): _measured([90.0])}
    assert "| float32   | plain | raises" in results.tables(found)
    assert bars.sentences(found) == [
        "1 of 2 cells ran: that all run does not hold.",
        "branched, float32, plain, float32 state raises ValueError: no",
    ]
    assert recipes._essence(found[cell]) == "ValueError: no"


def test_tables_have_a_row_for_each_precision_and_way() -> None:
    plain = Cell("branched", "float32", "plain", "float32")
    found = {plain: _measured([90.0, 92.0]), plain._replace(way="both", state="half"): _measured([95.0], 2**19)}
    heading, _, header, _, *rows = results.tables(found).splitlines()
    assert heading == "branched"
    assert [cell.strip() for cell in header.split("|")[1:-1]][:4] == [
        "precision",
        "way",
        "float32 state: accuracy %",
        "peak MiB",
    ]
    assert [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows] == [
        ["float32", "plain", "91.0 ± 1.4", "1.0 (1.00)", "1", "2.0 (1.00)", "", "", "", ""],
        ["float32", "both", "", "", "", "", "95.0 ± 0.0", "0.5 (0.50)", "1", "2.0 (1.00)"],
    ]


def test_bars_are_sentences_with_figures() -> None:
    found = _all_of("branched", float32=[94.0, 96.0], float16_unscaled=[9.0, 11.0], float16_tfmp=[94.5, 95.5])
    assert bars.sentences(found) == [
        "branched: float16 with tfmp is +0.00 points beside float32, whose trainings deviate by 1.03: that it is "
        "within one deviation holds.",
        "branched: float16 without scaling is 85.0 to 85.0 points below float32: that it is at least 20 holds.",
        "24 of 24 cells ran: that all run holds.",
        "branched: half state is +0.00 points (float32), +0.00 points (float16-tfmp) beside float32 state: that it is "
        "within 0.3 holds.",
    ]


def test_bars_that_do_not_hold_say_so() -> None:
    found = _all_of("transformer", float32=[94.0, 96.0], float16_tfmp=[90.0, 91.0])
    for cell in found:
        if cell.state == "half":
            found[cell] = _measured([94.0, 94.0])
    sentences = bars.sentences(found)
    assert "transformer: float16 with tfmp is -2.25 points beside float32" in sentences[0]
    assert "recomputation takes 100 % (float32 state), 100 % (half state) of the memory of plain" in sentences[1]
    assert "half state is -1.00 points (float32), +3.50 points (float16-tfmp)" in sentences[-1]
    assert [sentence.endswith("does not hold.") for sentence in sentences] == [True, True, True, False, True]


def test_failures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = _all_of("branched", float32=[95.0], float16_unscaled=[10.0])
    picture.draw(found, tmp_path / "recipes.png")
    assert (tmp_path / "recipes.png").stat().st_size > 0
