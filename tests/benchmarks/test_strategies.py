"""The replay of gradients through strategies, on short traces."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gradient_traces, strategies


def test_all_strategies_replay_all_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert strategies.main(["--steps", "60", "--window", "20", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert figures.keys() == strategies.strategies(20).keys()
    for figure in figures.values():
        assert figure["lost"].keys() == figure["unused_bits"].keys() == gradient_traces.traces(1).keys()
        assert figure["lost"]["10 overflows first"] >= 10
    assert figures["fixed, 2^10"]["lost"]["one overflow"] == 1
    assert figures["fixed, 2^10"]["unused_bits"]["above float16"] is None
    assert figures["LogMax, original"]["unused_bits"]["10 overflows first"] > 16
    assert figures["LogMax"]["unused_bits"]["10 overflows first"] < 8
    assert "LogMax, original (strategy 10 of 10)" in capsys.readouterr().out


def test_scales_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures.png"
    assert strategies.main(["--steps", "5", "--plot", str(path)]) == 0
    assert path.stat().st_size > 0


def test_original_log_max_stays_nan_after_gradients_of_zero() -> None:
    scales = strategies.original_log_max(np.float32([[1], [1], [0], [1], [1]]))[:, 0]
    assert np.isfinite(scales).tolist() == [True, True, True, False, False]


def test_recording_can_be_repeated(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "recording.json"
    assert gradient_traces.main(["--steps", "3", "--json", str(path)]) == 0
    anew = json.loads(path.read_text())["max_abs"]
    np.testing.assert_allclose(anew, gradient_traces.traces(3)["digits, recorded"], rtol=0.01)
