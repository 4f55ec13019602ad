"""The benchmark of looks at ranges, with few values."""

import json
from pathlib import Path

import keras
import pytest

if not keras.__version__.startswith("3."):
    pytest.skip("the benchmark is about Keras 3", allow_module_level=True)

from benchmarks import range_looks


def test_all_figures_are_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert range_looks.main(["--values", "4096", "--rounds", "2", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert len(figures["looks"]) == 6
    assert all(ratio > 0 for reads in figures["looks"].values() for ratio in reads.values())
    assert figures["steps"].keys() == {"not looked at", "looked at"}
    assert "| float16, gradients" in capsys.readouterr().out
