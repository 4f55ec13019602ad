"""The benchmark of `model.fit`, at sizes that take seconds; the tests do not look at its times."""

import json
from pathlib import Path

import keras
import pytest

from benchmarks import fit_speed

pytestmark = pytest.mark.skipif(not keras.__version__.startswith("3."), reason="runs with Keras 3 only")

_SETTINGS = {
    "layers": 1,
    "hidden": 8,
    "vocabulary": 30,
    "length": 5,
    "batch": 2,
    "rounds": 2,
    "steps": 3,
    "optimizer": "SGD",
}


def test_all_contenders_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "fit.json", tmp_path / "fit.png"
    settings = [f"--{name}={value}" for name, value in _SETTINGS.items()]
    assert fit_speed.main([*settings, "--json", str(path), "--plot", str(picture)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert list(figures) == ["bare", "Keras", "tfmp"]
    for figure in figures.values():
        assert figure["losses"] == pytest.approx(figures["bare"]["losses"], rel=1e-3)
        assert figure["steps_taken"] == 9
        assert len(figure["step_seconds"]) == 2
        assert min(figure["step_seconds"]) > 0
    assert "of Keras" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
