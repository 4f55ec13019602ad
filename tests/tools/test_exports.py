"""Exported steps and trainings run alike where there is no TensorFlow, on JAX."""

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import python_process

from benchmarks.harness import keras_contenders

pytestmark = pytest.mark.skipif(keras_contenders.KERAS != "Keras 3", reason="exports what Keras 3 trains")

_SMALL = "--layers 1 --hidden 64 --vocabulary 32 --length 16 --batch 4"

#: By kind of program: the options by which it is exported, and those by which it is run.
_KINDS = {
    "steps": ("--shapes tiny", "--rounds 1 --copy-mib 1"),
    "steps for CPUs": ("--shapes tiny --for-cpu", "--rounds 1 --copy-mib 1"),
    "trainings": (_SMALL, "--rounds 1 --in-a-row 1 --product 8 --steps 30"),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a kind of programs, which it writes once."""
    pytest.importorskip("jax", reason="needs JAX, which the tox environment tf221_every has")
    from tools import export_step, export_training

    @functools.cache
    def folder_of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("exported") / "programs"
        tool: Any = export_training if kind == "trainings" else export_step
        with contextlib.redirect_stdout(io.StringIO()):
            assert tool.main([str(folder), *_KINDS[kind][0].split()]) == 0
        return folder

    return folder_of


def _run(kind: str, folder: Path, *options: str) -> tuple[int, str]:
    done = python_process.run(str(folder / "run.py"), *_KINDS[kind][1].split(), *options)
    return done.returncode, done.stdout + done.stderr * (done.returncode > 1)


@pytest.mark.parametrize("kind", ["steps", "steps for CPUs"])
def test_programs_take_the_right_steps_on_jax(kind: str, folder_of: Callable[[str], Path]) -> None:
    status, shown = _run(kind, folder_of(kind))
    assert (status, shown.splitlines()[-1]) == (0, "all programs took the right steps")


def test_programs_train_alike_on_jax(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    status, shown = _run("trainings", folder_of("trainings"), "--optimized", str(tmp_path))
    assert (status, shown.splitlines()[-1]) == (0, "all programs trained alike")
    table = ([cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines())
    rows = {row[0]: row for row in table if row}
    # A loss scale of 2**40 is halved in 20 steps and more, in both wrappers.
    assert rows["float16, tfmp"][10] == rows["float16, Keras 3"][10]
    assert int(rows["float16, tfmp"][10]) > 20
    assert "f16" in (tmp_path / "float16-tfmp.txt").read_text()
    # Nothing but the rounding of products differs here, and XLA writes the default in fewer bytes.
    exact, rounded = (folder_of("trainings") / f"{name}.hlo" for name in ("float32", "tensorfloat-32"))
    assert exact.read_bytes() != rounded.read_bytes()


def test_a_program_that_does_not_skip_is_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("steps"), tmp_path / "programs")
    # A program that never skips takes the place of one that does.
    (folder / "sgd-keras3.hlo").write_bytes((folder / "sgd-bare.hlo").read_bytes())
    entries = json.loads((folder / "programs.json").read_text())
    rows = {row["file"]: row for row in entries if row["file"].startswith("sgd")}
    bare = rows["sgd-bare.hlo"]
    rows["sgd-keras3.hlo"].update({name: bare[name] for name in ("variables", "weights", "updates")})
    (folder / "programs.json").write_text(json.dumps([*rows.values()]))
    status, shown = _run("steps", folder)
    assert status == 1
    assert "WRONG: SGD, skipped, Keras 3: wrong weights" in shown


def test_a_training_that_does_not_skip_is_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("trainings"), tmp_path / "programs")
    plain, *_, scaled = json.loads((folder / "programs.json").read_text())
    # A program without a wrapper takes the place of the one with tfmp's. Its learning rate stands for the loss scale.
    learning_rate = next(place for place, each in enumerate(plain["variables"]) if each["shape"] == [])
    unwrapped = plain | {"wrapper": scaled["wrapper"], "loss_scale": learning_rate}
    (folder / "programs.json").write_text(json.dumps([unwrapped]))
    status, shown = _run("trainings", folder)
    assert status == 1
    assert "tfmp: no step was skipped" in shown
