"""Runs and times the training steps that `tools.export_step` wrote, with JAX and NumPy; a GPU needs no TensorFlow.

    python run.py

It lies beside the programs, as `run.py`. It takes steps by each program on the first device that JAX finds, and checks
that all programs of the same kind end at the same weights, and that a skipped step leaves the weights as they are. Then
the programs of a kind take steps in turns. Its table has medians; the ratios are those of the same round, with the
bounds of the middle half of them.

*Least* is the time for the bytes that a step has to move, at the bandwidth that the device reached in the same process
(reading and writing float32 values). A step that is applied reads each gradient, and reads and writes each variable
that it changes. A wrapper reads the gradients once more before: it has to know that all of them are finite before it
changes the first variable. A step that is skipped reads each gradient once. Weights fewer than the device's cache holds
take less. The columns between are from a profile of a GPU: the kernels of a step, their time without that in which the
GPU waits for the host, and how often the host waits to read a value.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tools import exported_program
from tools.exported_program import Program

#: The loss scale. Float32 represents the gradients times the scale exactly.
_SCALE = 2.0**15


def _gradients(program: Program, outcome: str) -> list[Any]:
    """Return gradients for a program on the device, the same values for each. In a skipped step the last is infinite.

    A bare optimizer gets them in true magnitude, the others those of the scaled loss.
    """
    rng = np.random.default_rng(0)
    shapes = [each["shape"] for each in program.entry["arguments"]]
    values = [np.float32(rng.integers(-128, 128, shape, np.int8)) / 4096 for shape in shapes]
    scaled = [each * np.float32(1 if program.name == "bare" else _SCALE) for each in values]
    if outcome == "skipped":
        scaled[-1].flat[-1] = np.inf
    return list(map(jax.device_put, scaled))


def _least_bytes(program: Program, outcome: str) -> int:
    """Return the bytes that a step cannot avoid to read and write; the first lines of this file say which."""
    grads = sum(map(_bytes, program.entry["arguments"]))
    if outcome == "skipped":
        return grads
    changed = sum(_bytes(program.entry["variables"][variable]) for _, variable in program.entry["updates"])
    return (1 if program.entry["kind"] != "Adam, clipped" and program.name == "bare" else 2) * grads + 2 * changed


def _bytes(array: dict[str, Any]) -> int:
    return int(np.prod(array["shape"], dtype=np.int64)) * np.dtype(array["dtype"]).itemsize


def _checked(programs: Sequence[Program], outcome: str, steps: int) -> list[str]:
    """Take steps, and return what is wrong with them."""
    skips, wrong = outcome == "skipped", []
    expected: list[np.ndarray] = []
    for program in programs:
        grads, before = _gradients(program, outcome), list(map(np.asarray, program.weights()))
        for _ in range(steps):
            program.run(grads)
        weights = list(map(np.asarray, program.weights()))
        expected = before if skips else expected or weights
        if not skips and not all(map(np.any, weights)):
            wrong.append(f"{program.name}: the weights did not move")
        if not all(_are_close(one, other) for one, other in zip(weights, expected, strict=True)):
            wrong.append(f"{program.name}: wrong weights after {steps} steps")
    return wrong


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-3 * np.max(np.abs(other), initial=0.0)))


def _rows(
    kind: str, outcome: str, programs: Sequence[Program], options: argparse.Namespace, bandwidth: float
) -> Iterator[str]:
    runs = {each.name: functools.partial(_started, each, _gradients(each, outcome)) for each in programs}
    turns = exported_program.turns(runs, options.rounds, options.in_a_row)
    base = turns["Keras 3" if "Keras 3" in turns else programs[0].name]
    for program in programs:
        cells = [
            f"{kind}, {outcome}",
            program.name,
            f"{1e3 * np.median(turns[program.name]):.3f}",
            exported_program.ratio(turns[program.name], base),
            *exported_program.cells_of_device(runs[program.name]),
            f"{1e3 * _least_bytes(program, outcome) / bandwidth:.3f}",
            f"{program.temporary_bytes / 1e6:.1f}",
            f"{program.compile_seconds:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _started(program: Program, grads: Sequence[Any]) -> Callable[[], None]:
    program.run(grads)
    return program.wait


def main(argv: Sequence[str] | None = None) -> int:
    """Run, check and time the programs.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 1 if a program took wrong steps.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="(default: that of this file)")
    parser.add_argument("--steps", type=int, default=3, help="steps before the weights are compared (%(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each program (%(default)s)")
    parser.add_argument(
        "--in-a-row", type=int, default=10, help="steps in a turn; the last is waited for (%(default)s)"
    )
    parser.add_argument("--copy-mib", type=int, default=1024, help="size of the copy that is timed (%(default)s)")
    parser.add_argument("--optimized", type=Path, help="a folder for the programs as XLA optimized them")
    options = parser.parse_args(argv)

    # Counts of steps are 64-bit integers.
    jax.config.update("jax_enable_x64", True)
    entries = json.loads((options.folder / "programs.json").read_text())
    bandwidth = exported_program.copy_bandwidth(options.copy_mib << 20)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, copying at {bandwidth / 1e9:.0f} GB/s")
    heads = ["step", "optimizer", "ms", "/ Keras 3's wrapper", *exported_program.HEADS_OF_DEVICE]
    heads += ["least, ms", "temporary, MB", "compilation, s"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    wrong = []
    for kind in dict.fromkeys(entry["kind"] for entry in entries):
        programs = [Program(options.folder, entry) for entry in entries if entry["kind"] == kind]
        for outcome in ("applied", "skipped"):
            # A bare optimizer would apply what overflowed.
            able = [program for program in programs if not (outcome == "skipped" and program.name == "bare")]
            for program in able:
                program.restart()
            wrong += [f"{kind}, {outcome}, {each}" for each in _checked(able, outcome, options.steps)]
            print("\n".join(_rows(kind, outcome, able, options, bandwidth)), flush=True)
        exported_program.write_optimized(programs, options.optimized)
    print("\n".join(f"WRONG: {each}" for each in wrong) or "all programs took the right steps")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
