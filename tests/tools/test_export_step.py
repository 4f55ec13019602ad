"""Exported steps train alike where there is no TensorFlow, on JAX."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import keras_contenders

pytestmark = pytest.mark.skipif(bool(keras_contenders.why_not_here()), reason=keras_contenders.why_not_here())


@pytest.mark.parametrize("form", [[], ["--for-cpu"]])
def test_programs_take_the_right_steps_on_jax(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax", reason="needs JAX, which the tox environment tf221 has")
    from tools import export_step

    assert export_step.main([str(tmp_path / "programs"), "--shapes", "tiny", *form]) == 0
    assert "adam-clipped-tfmp.hlo: " in capsys.readouterr().out
    command = [sys.executable, str(tmp_path / "programs" / "run.py"), "--rounds", "3"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[-1] == "all programs took the right steps"
    # A table with its header: three programs of each kind for steps that are applied, two for those that are skipped.
    assert len([line for line in lines if line.startswith("|")]) == 2 + 3 * (3 + 2)


def test_a_program_that_takes_wrong_steps_is_named(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="needs JAX, which the tox environment tf221 has")
    from tools import export_step

    folder = tmp_path / "programs"
    export_step.main([str(folder), "--shapes", "tiny"])
    # In the place of Keras' wrapper, one that never skips.
    (folder / "sgd-keras3.hlo").write_bytes((folder / "sgd-bare.hlo").read_bytes())
    rows = json.loads((folder / "programs.json").read_text())
    bare = next(row for row in rows if row["file"] == "sgd-bare.hlo")
    other = next(row for row in rows if row["file"] == "sgd-keras3.hlo")
    other.update({name: bare[name] for name in ("variables", "weights", "updates")})
    (folder / "programs.json").write_text(json.dumps(rows))
    command = [sys.executable, str(folder / "run.py"), "--rounds", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 1
    assert "WRONG: SGD, skipped, Keras 3: wrong weights" in shown.stdout
