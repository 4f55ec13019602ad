"""Runs and times the trainings that `tools.export_training` wrote, with JAX and NumPy; a GPU needs no TensorFlow.

    python run.py

It lies beside the programs, as `run.py`. Each program trains on the first device that JAX finds, from the same weights
and on the same tokens, which count up. The losses at the end have to agree with that of float32. Then the programs take
steps in turns; the table has medians, and the ratios are those of the same round, with the bounds of the middle half of
them. Operations per second count the products of matrices only; the first line has those of a product of two square
matrices on this device.

In mixed precision with float16 a training begins a second time with a loss scale so large that gradients overflow. Each
such step has to leave the weights as they are and to halve the loss scale, until a step is applied.
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
import jax.numpy as jnp
import numpy as np

from tools import exported_program
from tools.exported_program import Program

#: The loss scale of the training whose gradients overflow.
_TOO_LARGE = 2.0**40

#: The types in which products of matrices are measured, with JAX' names of their precisions.
_PRODUCTS = {
    "float32": ("float32", "highest"),
    "TensorFloat-32": ("float32", "default"),
    "bfloat16": ("bfloat16", "default"),
    "float16": ("float16", "default"),
}


def _batch(program: Program, seed: int) -> list[Any]:
    """Return rows of tokens on the device that count up, and the tokens that follow them."""
    rows, length = program.entry["arguments"][0]["shape"]
    starts = np.random.default_rng(seed).integers(program.entry["vocabulary"], size=[rows, 1])
    tokens = np.int32((starts + np.arange(length + 1)) % program.entry["vocabulary"])
    return [jax.device_put(tokens[:, :-1]), jax.device_put(tokens[:, 1:])]


def _losses(program: Program, steps: int) -> list[float]:
    """Train from the first weights, and return the loss of each step."""
    program.restart()
    return [float(program.run(_batch(program, seed))[0]) for seed in range(steps)]


def _overflows(program: Program) -> tuple[int, str]:
    """Take steps that overflow until one is applied; return the number of those, and what is wrong with them."""
    program.restart()
    place = program.entry["loss_scale"]
    program.state[place] = jax.device_put(np.full([], _TOO_LARGE, np.float32))
    for skipped in range(40):
        before = list(map(jnp.copy, program.weights()))
        loss_scale = float(program.state[place])
        (loss,) = program.run(_batch(program, skipped))
        same = [bool(jnp.array_equal(one, other)) for one, other in zip(before, program.weights(), strict=True)]
        if not all(map(bool, map(jnp.all, map(jnp.isfinite, program.weights())))) or not np.isfinite(float(loss)):
            return skipped, "an overflow reached the weights"
        if float(program.state[place]) == loss_scale and not any(same):
            return skipped, "" if skipped else "no step was skipped"
        if not all(same) or float(program.state[place]) != loss_scale / 2:
            return skipped, "a step was skipped in part"
    return skipped, "no step was applied"


def _rows(
    programs: Sequence[Program], options: argparse.Namespace, losses: dict[str, list[float]], skipped: dict[str, int]
) -> Iterator[str]:
    runs = {program.name: functools.partial(_started, program, _batch(program, 0)) for program in programs}
    turns = exported_program.turns(runs, options.rounds, options.in_a_row)
    for program in programs:
        seconds = float(np.median(turns[program.name]))
        cells = [
            program.name,
            f"{1e3 * seconds:.2f}",
            exported_program.ratio(turns[program.name], turns[programs[0].name]),
            *exported_program.cells_of_device(runs[program.name]),
            f"{program.entry['operations'] / seconds / 1e12:.1f}",
            f"{program.temporary_bytes / 1e9:.2f}",
            f"{losses[program.name][0]:.4f}",
            f"{_last(losses[program.name]):.4f}",
            str(skipped.get(program.name, "")),
            f"{program.compile_seconds:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _started(program: Program, batch: Sequence[Any]) -> Callable[[], None]:
    program.run(batch)
    return program.wait


def _last(losses: Sequence[float]) -> float:
    return float(np.mean(losses[-5:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, check and time the programs.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 1 if a program trained wrongly.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="(default: that of this file)")
    parser.add_argument("--steps", type=int, default=100, help="steps before the losses are compared (%(default)s)")
    parser.add_argument("--bound", type=float, default=0.02, help="the losses' relative difference (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each program (%(default)s)")
    parser.add_argument("--in-a-row", type=int, default=5, help="steps in a turn; the last is waited for (%(default)s)")
    parser.add_argument("--product", type=int, default=8192, help="size of the products that are timed (%(default)s)")
    parser.add_argument("--optimized", type=Path, help="a folder for the programs as XLA optimized them")
    options = parser.parse_args(argv)

    # Counts of steps are 64-bit integers.
    jax.config.update("jax_enable_x64", True)
    rates = {name: exported_program.product_rate(*each, options.product) for name, each in _PRODUCTS.items()}
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; products of matrices, TFLOP/s:")
    print(", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in rates.items()), flush=True)
    entries = json.loads((options.folder / "programs.json").read_text())
    programs = [Program(options.folder, entry) for entry in entries]
    losses: dict[str, list[float]] = {}
    skipped: dict[str, int] = {}
    wrong = []
    for program in programs:
        own = losses[program.name] = _losses(program, options.steps)
        base = losses[programs[0].name]
        if not abs(_last(own) - _last(base)) <= options.bound * _last(base):
            wrong.append(
                f"{program.name}: the loss is {_last(own)} after {options.steps} steps, got {_last(base)} in float32"
            )
        if not own[-1] < own[0]:
            wrong.append(f"{program.name}: the loss did not fall")
        if program.entry["loss_scale"] is not None:
            skipped[program.name], fault = _overflows(program)
            wrong += [f"{program.name}: {fault}"] if fault else []
    heads = ["training", "ms", "/ the first", *exported_program.HEADS_OF_DEVICE, "TFLOP/s", "temporary, GB"]
    heads += ["first loss", "last losses", "skipped", "compilation, s"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    print("\n".join(_rows(programs, options, losses, skipped)), flush=True)
    exported_program.write_optimized(programs, options.optimized)
    print("\n".join(f"WRONG: {each}" for each in wrong) or "all programs trained alike")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
