"""Tests of the example that trains on corrupt batches."""

import argparse
import re
import sys
from pathlib import Path

import example_processes
import numpy as np
import pytest

from estimator_examples import digits_session, digits_spikes


def _tables(*options: str) -> dict[str, dict[str, list[str]]]:
    """Run the example, and return the cells of its tables by corruption and way to train."""
    pytest.importorskip("sklearn")
    # On some CPUs, oneDNN computes a float16 layer 200 times slower than TensorFlow's own kernels do.
    done = example_processes.run("digits_spikes", *options, TF_ENABLE_ONEDNN_OPTS="0")
    assert done.returncode == 0, done.stderr
    tables = re.findall(r"(?m)^Corruption: (\S+) .*\n((?:  .*\n)+)", done.stdout)
    return {
        corruption: {row[0]: row[1:] for row in (re.split(r"  +", line.strip()) for line in rows.splitlines())}
        for corruption, rows in tables
    }


def _accuracy(cell: str) -> float:
    return float(cell.partition(" %")[0])


def test_bursts_of_corrupt_batches_do_harm_unless_their_steps_are_skipped(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    options = ["--seeds=1", "--steps=207", "--every=100", "--in-a-row=8", "--start=128", f"--plot={picture}"]
    tables = _tables(*options, "--corruptions", "next-labels", "noise")
    assert tables.keys() == {"next-labels", "noise"}
    rows = tables["next-labels"]
    assert list(rows) == ["clean batches only", "nothing done", "clipped at 1", "spikes skipped", "both"]
    # The last steps are those of a burst.
    assert _accuracy(rows["nothing done"][0]) < 80
    for name in ("spikes skipped", "both"):
        assert _accuracy(rows[name][0]) > 90
        assert rows[name][2:] == ["8 of 8", "0 of 8", "0"]
    assert rows["nothing done"][2:] == rows["clipped at 1"][2:] == ["0 of 8", "0 of 8", "0"]
    assert rows["clean batches only"] == tables["noise"]["clean batches only"]
    skipped, overflowed = (int(cell.partition(" of 8")[0]) for cell in tables["noise"]["spikes skipped"][2:4])
    assert skipped + overflowed == 8
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, {5, 10}),
        ({"in_a_row": 3}, {5, 6, 7, 10, 11, 12}),
        ({"start": 5}, {10}),
        ({"in_a_row": 3, "steps": 10}, {5, 6, 7, 10}),
        ({"every": 13}, set()),
    ],
)
def test_corrupt_steps_come_at_the_same_distance(options: dict[str, int], steps: set[int]) -> None:
    defaults = {"every": 5, "steps": 12, "in_a_row": 1, "start": 0}
    assert digits_spikes.corrupt_steps(argparse.Namespace(**{**defaults, **options})) == steps


@pytest.mark.parametrize("name", digits_spikes.CORRUPTIONS)
def test_only_the_batches_of_the_corrupt_steps_change(name: str) -> None:
    rng = np.random.default_rng(0)
    images, labels = np.float32(rng.random([6, 4, 8, 8, 1])), rng.integers(10, size=[6, 4])
    corrupt = digits_spikes.with_corruption(digits_session.Digits(images, labels), name, {2, 5}, seed=0)
    changed = [
        step
        for step in range(1, 7)
        if (corrupt.images[step - 1] != images[step - 1]).any() or (corrupt.labels[step - 1] != labels[step - 1]).any()
    ]
    assert changed == [2, 5]
    assert (corrupt.images.dtype, corrupt.labels.dtype) == (images.dtype, labels.dtype)
    if "labels" in name:
        assert (corrupt.labels[[1, 4]] != labels[[1, 4]]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds=0"], "argument --seeds: must be 1 or more, got 0."),
        (["--start=-1"], "argument --start: must be 0 or more, got -1."),
        (["--clip-norm=0"], "argument --clip-norm: must be a finite number above 0, got 0."),
        (["--corruptions", "bits"], "argument --corruptions: invalid choice: 'bits'"),
    ],
)
def test_a_wrong_argument_ends_the_program(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        digits_spikes.main(options)
    assert message in capsys.readouterr().err


def test_without_scikit_learn_the_extra_that_brings_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert digits_spikes.main([]) == 2
    assert "install tfmp with its extra" in capsys.readouterr().err
