"""Prints a table of how trainings end in which some replicas overflow, with tfmp's wrapper and with Keras' own.

PYTHONPATH=.:tests python tests/optimizers/overflow_matrix.py
"""

import importlib
import importlib.util
import tempfile
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import replica_processes
import replica_training
from replica_processes import Finished
from replica_training import OVERFLOWS, inputs

_SECONDS = 40


def main() -> None:
    for row in _rows():
        print("|", " | ".join(row), "|", flush=True)  # noqa: T201 - a command line prints


def _rows() -> Iterator[list[str]]:
    yield ["Keras", "strategy", "overflow", "by", "tfmp", "Keras' own"]
    yield ["---"] * 6
    packages = [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]
    for package, strategy, overflow, way in product(
        packages, ["mirrored", "workers"], [*OVERFLOWS, "random"], ["loop", "fit"]
    ):
        title = f"{package} {importlib.import_module(package).__version__}"
        yield [
            title,
            strategy,
            overflow,
            way,
            *(_cell(strategy, package, wrapper, overflow, way) for wrapper in ("ours", "stock")),
        ]


def _cell(strategy: str, package: str, wrapper: str, overflow: str, way: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        program = replica_training.command(package, strategy, wrapper, overflow, way)
        environments = replica_processes.two_workers() if strategy == "workers" else [{}]
        finished = replica_processes.run(program, Path(directory), _SECONDS, environments)
    return _outcome(finished, f"{package}/{way}", inputs(overflow))


def _outcome(finished: Finished, way: str, fed: np.ndarray) -> str:
    # An array for each step, with the axes process, replica, and weight (kernel, bias). A training that hangs or fails
    # has fewer steps.
    steps = [
        np.array([[(kernel[0][0], bias[0]) for kernel, bias, *_ in state] for state in states])
        for states in zip(*finished.states(way), strict=False)
    ]
    found = {
        "non-finite weights": not np.isfinite(steps).all(),
        "replicas differ": not all(
            np.array_equal(step, np.broadcast_to(step[:1, :1], step.shape), equal_nan=True) for step in steps
        ),
        f"hangs (killed after {_SECONDS} s of silence)": None in finished.codes and not any(finished.codes),
        f"crashes: {_last_error(finished)}": any(finished.codes),
    }
    if any(found.values()):
        return ", ".join(name for name, true in found.items() if true)
    skips = [np.array_equal(before, after) for before, after in pairwise(steps)]
    return "ok" if skips == (~np.isfinite(fed).all(axis=1)[1:]).tolist() else "other steps are skipped"


def _last_error(finished: Finished) -> str:
    lines = [line for log in finished.logs for line in log.splitlines() if "Error" in line.split(":")[0]]
    return lines[-1][:80] if lines else "no message"


if __name__ == "__main__":
    main()
