"""Exported steps train alike where there is no TensorFlow, on JAX."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import keras_contenders

pytestmark = pytest.mark.skipif(keras_contenders.KERAS != "Keras 3", reason="exports steps of Keras 3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the programs of both forms, and return their folders."""
    pytest.importorskip("jax", reason="needs JAX, which the tox environment tf221 has")
    from tools import export_step

    made = {}
    for name, form in {"accelerators": [], "CPUs": ["--for-cpu"]}.items():
        made[name] = tmp_path_factory.mktemp("programs") / name
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert export_step.main([str(made[name]), "--shapes", "tiny", *form]) == 0
        assert "adam-clipped-tfmp.hlo: " in printed.getvalue()
    return made


@pytest.mark.parametrize("form", ["accelerators", "CPUs"])
def test_programs_take_the_right_steps_on_jax(form: str, folders: dict[str, Path]) -> None:
    command = [sys.executable, str(folders[form] / "run.py"), "--rounds", "1", "--copy-mib", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[-1] == "all programs took the right steps"
    # A table with its header: three programs of each kind for steps that are applied, two for those that are skipped.
    assert len([line for line in lines if line.startswith("|")]) == 2 + 3 * (3 + 2)


def test_a_program_that_takes_wrong_steps_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["accelerators"], tmp_path / "programs")
    # In the place of Keras' wrapper, one that never skips.
    (folder / "sgd-keras3.hlo").write_bytes((folder / "sgd-bare.hlo").read_bytes())
    rows = [row for row in json.loads((folder / "programs.json").read_text()) if row["file"].startswith("sgd")]
    bare = next(row for row in rows if row["file"] == "sgd-bare.hlo")
    other = next(row for row in rows if row["file"] == "sgd-keras3.hlo")
    other.update({name: bare[name] for name in ("variables", "weights", "updates")})
    (folder / "programs.json").write_text(json.dumps(rows))
    command = [sys.executable, str(folder / "run.py"), "--rounds", "1", "--copy-mib", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 1
    assert "WRONG: SGD, skipped, Keras 3: wrong weights" in shown.stdout
