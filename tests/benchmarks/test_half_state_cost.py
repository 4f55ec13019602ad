"""The benchmark of half-precision optimizer state, with few weights."""

import json
from pathlib import Path

import keras
import pytest

if not keras.__version__.startswith("3."):
    pytest.skip("the benchmark is about Keras 3", allow_module_level=True)

from benchmarks import half_state


def test_all_figures_are_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert half_state.main(["--optimizers", "Adam", "--size", "8", "--rounds", "2", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    for mode in ("compiled", "graph"):
        results = figures[f"Adam, {mode}"]
        assert [result["bytes"] for result in results.values()] == [4096, 3072, 3072, 3072, 2048]
        assert all(result["ratio"] > 0 for result in results.values())
    assert "| all bfloat16, stochastic      | 0.50  |" in capsys.readouterr().out
