"""Exported trainings train alike where there is no TensorFlow, on JAX."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import keras_contenders

pytestmark = pytest.mark.skipif(keras_contenders.KERAS != "Keras 3", reason="exports trainings of Keras 3")

_SMALL = ["--layers", "1", "--hidden", "64", "--vocabulary", "32", "--length", "16", "--batch", "4"]
_SHORT = ["--rounds", "1", "--in-a-row", "1", "--product", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the programs, and return their folder."""
    pytest.importorskip("jax", reason="needs JAX, which the tox environment tf221 has")
    from tools import export_training

    made = tmp_path_factory.mktemp("trainings") / "programs"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert export_training.main([str(made), *_SMALL]) == 0
    assert "float16-tfmp.hlo: " in printed.getvalue()
    return made


def _run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run.py"), *_SHORT, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_programs_train_alike_on_jax(folder: Path, tmp_path: Path) -> None:
    shown = _run(folder, "--steps", "30", "--optimized", str(tmp_path))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[-1] == "all programs trained alike"
    rows = {row[0]: row for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines) if row}
    names = ["float32", "TensorFloat-32", "bfloat16", "float16, Keras 3", "float16, tfmp"]
    assert list(rows)[2:] == names
    # A loss scale of 2**40 is halved in 20 steps and more, in both wrappers.
    assert rows["float16, tfmp"][10] == rows["float16, Keras 3"][10]
    assert int(rows["float16, tfmp"][10]) > 20
    assert "f16" in (tmp_path / "float16-tfmp.txt").read_text()


def test_products_are_rounded_to_tensorfloat_32_in_the_program_of_that_name_only(folder: Path) -> None:
    # Nothing else differs, and XLA writes the default in fewer bytes.
    exact, rounded = (folder / f"{name}.hlo" for name in ("float32", "tensorfloat-32"))
    assert exact.read_bytes() != rounded.read_bytes()


def test_a_program_with_another_loss_is_named(folder: Path) -> None:
    # Rounding alone makes the losses differ by more than nothing.
    shown = _run(folder, "--steps", "3", "--bound", "0")
    assert shown.returncode == 1
    assert "WRONG: bfloat16: the loss is " in shown.stdout


def test_a_step_that_is_not_skipped_is_named(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "programs")
    entries = json.loads((copied / "programs.json").read_text())
    plain, scaled = entries[0], entries[-1]
    # In the place of tfmp's program, one that never skips and takes a variable of no use for the loss scale.
    learning_rate = next(place for place, each in enumerate(plain["variables"]) if each["shape"] == [])
    entries[-1] = plain | {"wrapper": scaled["wrapper"], "loss_scale": learning_rate}
    (copied / "programs.json").write_text(json.dumps([entries[0], entries[-1]]))
    shown = _run(copied, "--steps", "30")
    assert shown.returncode == 1
    assert "WRONG: float16, tfmp: " in shown.stdout
