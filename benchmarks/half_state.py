"""Measures what half-precision optimizer state costs and saves in the update of Keras 3 optimizers.

    python -m benchmarks.half_state --json half_state.json

Every contender updates weights of eight matrices, in a `tfmp.LossScaleOptimizer`, from the same gradients. They take
turns; the ratios compare updates of the same round. "bytes" are those of the slots.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import contest, report

_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
}

#: What `half_state` is given, by the name of the contender. Without settings, the state is in float32.
_STATES: dict[str, dict[str, str]] = {
    "float32": {},
    "momentum bfloat16": {"momentum": "bfloat16"},
    "momentum float16": {"momentum": "float16"},
    "momentum bfloat16, stochastic": {"momentum": "bfloat16", "rounding": "stochastic"},
    "all bfloat16, stochastic": {"momentum": "bfloat16", "velocity": "bfloat16", "rounding": "stochastic"},
}

_MATRICES = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    figures: dict[str, Any] = {"conditions": report.printed_conditions()}
    for mode in ("compiled", "graph"):
        for name in options.optimizers:
            results = measure(name, options.size, mode == "compiled", options.rounds)
            figures[f"{name}, {mode}"] = results
            rows = [
                [state, f"{result['bytes'] / results['float32']['bytes']:.2f}", f"{result['ratio']:.2f}"]
                for state, result in results.items()
            ]
            print(f"\n{name}, {mode}\n\n{report.table(['state', 'bytes', 'time'], rows)}", flush=True)
            report.write_json(options.json, figures)
    return 0


def measure(name: str, size: int, jit_compile: bool, rounds: int) -> dict[str, dict[str, float]]:
    """Return the bytes and the times of the update by contender.

    Args:
        name: The optimizer, a key of `_OPTIMIZERS`.
        size: The rows and columns of each matrix.
        jit_compile: Whether XLA compiles the update.
        rounds: The number of timed updates of each contender.
    """
    updates: dict[str, Callable[[], object]] = {}
    found: dict[str, dict[str, float]] = {}
    for state, settings in _STATES.items():
        if name == "SGD" and "velocity" in settings:
            continue
        optimizer = _OPTIMIZERS[name]()
        updates[state] = _update(tfmp.half_state(optimizer, **settings) if settings else optimizer, size, jit_compile)
        # The first call traces, and the second allocates what XLA keeps.
        updates[state]()
        updates[state]()
        slots = [variable for variable in optimizer.variables if len(variable.shape) == 2]
        found[state] = {"bytes": sum(variable.numpy().nbytes for variable in slots)}
    seconds: Mapping[str, list[float]] = {state: [] for state in updates}
    for _ in range(rounds):
        for state, update in updates.items():
            seconds[state].append(contest.seconds_of(update))
    for state, times in seconds.items():
        found[state]["ratio"] = report.median_ratio(times, seconds["float32"])
    return found


def _update(optimizer: Any, size: int, jit_compile: bool) -> Callable[[], object]:  # noqa: ANN401 - of Keras
    numbers = np.random.default_rng(0)
    weights = [keras.Variable(numbers.normal(size=[size, size]).astype(np.float32)) for _ in range(_MATRICES)]
    grads = [tf.constant(numbers.normal(size=[size, size]).astype(np.float32)) for _ in range(_MATRICES)]
    scaled = tfmp.LossScaleOptimizer(optimizer, tfmp.FixedLossScaleManager(1024.0), jit_compile=jit_compile)
    scaled.build(weights)
    # So that the gradients are known to be those of a scaled loss.
    scaled.scale_loss(tf.constant(0.0))
    return tf.function(lambda: scaled.apply(grads, weights), autograph=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--optimizers", nargs="+", choices=_OPTIMIZERS, default=list(_OPTIMIZERS), help="optimizers (default: all)"
    )
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a matrix (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="updates of each contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
