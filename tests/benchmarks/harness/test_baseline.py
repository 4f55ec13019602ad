"""The comparison of two checkouts' tfmp, on tiny weights."""

import json
import shutil
from pathlib import Path

import pytest

import tfmp
from benchmarks import graph_step_cost
from benchmarks.harness import baseline

_TINY = ["--shapes", "tiny", "--modes", "resource", "--optimizers", "SGD", "--rounds", "3", "--pairs", "1"]


def test_steps_of_both_checkouts_are_taken_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(baseline, "_SECONDS_OF_TURN", 0.01)
    other = shutil.copytree(Path(tfmp.__file__).parent, tmp_path / "tfmp")
    with (other / "__init__.py").open("a") as module:
        module.write("\n__import__('pathlib').Path(__file__).with_name('imported').touch()\n")
    path = tmp_path / "figures.json"
    assert graph_step_cost.main([*_TINY, "--baseline", str(tmp_path), "--json", str(path)]) == 0
    assert (other / "imported").exists()
    (figure,) = json.loads(path.read_text())["figures"]
    assert figure["turns"].keys() == figure["ratios"].keys() == {"bare", "tfmp"}
    for name, (pair,) in figure["turns"].items():
        assert len(pair) == 3
        assert figure["ratios"][name] == baseline.ratio([pair]) > 0
    printed = capsys.readouterr().out
    assert "| tfmp |" in printed
    assert "Slowest beside the baseline: tfmp in tiny, resource, SGD, " in printed


def test_process_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "tfmp").mkdir()
    (tmp_path / "tfmp" / "__init__.py").write_text("raise ImportError('not a real one')\n")
    with pytest.raises(RuntimeError, match=f"the process with the tfmp of {tmp_path} ended with 1"):
        graph_step_cost.main([*_TINY, "--baseline", str(tmp_path)])


def test_directory_without_tfmp_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        graph_step_cost.main([*_TINY, "--baseline", str(tmp_path)])
    assert f"{tmp_path} has no tfmp/__init__.py: name the root of a checkout of tfmp." in capsys.readouterr().err
