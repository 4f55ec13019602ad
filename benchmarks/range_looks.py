"""Measures what a look at ranges costs: how often one could read the values instead.

    python -m benchmarks.range_looks

A look is `tfmp.ranges.exponent_counts` of one tensor. A read is the largest magnitude, `tf.reduce_max(tf.abs(x))`, the
simplest question about a range; `tf.reduce_sum(x)`, the cheapest pass over the values that TensorFlow has, is given as
well. All three are timed in turn, in the same rounds, as a `tf.function`, and the figures are medians of the ratios of
a round. Values like those of gradients have no zeros; half of the values of an activation of relu are zero, which needs
one pass more to tell zeros from subnormal numbers.

The second table is the cost of what `LossScaleCallback(ranges_every_n_steps=...)` adds to a training step of Keras:
the time of steps that are not looked at, and of steps that are, divided by that of steps that cannot be looked at.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import report

_TYPES = ("float32", "float16", "bfloat16")
_READS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "largest magnitude": lambda x: tf.reduce_max(tf.abs(x)),
    "sum": tf.reduce_sum,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    looks = {
        f"{dtype}, {kind}": looks_in_reads(_values(kind, dtype, options.values), options.rounds)
        for dtype in _TYPES
        for kind in ("gradients", "activations of relu")
    }
    rows = [[name, *(f"{ratio:.1f}" for ratio in ratios.values())] for name, ratios in looks.items()]
    print(f"\n{report.table(['a look, in reads of', *_READS], rows)}", flush=True)
    steps = step_ratios(options.rounds)
    print(f"\n{report.table(['step of Keras', 'time'], [[name, f'{ratio:.2f}'] for name, ratio in steps.items()])}")
    report.write_json(options.json, {"conditions": conditions, "looks": looks, "steps": steps})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=2**23, help="values of the tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=25, help="rounds of each measurement (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


def _values(kind: str, dtype: str, count: int) -> tf.Tensor:
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    return tf.cast(values if kind == "gradients" else np.maximum(values, 0), dtype)


def looks_in_reads(values: tf.Tensor, rounds: int) -> dict[str, float]:
    """Return how long a look takes, in reads of each kind.

    Args:
        values: The tensor to look at.
        rounds: How often to measure.
    """
    functions: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
        "look": lambda x: tfmp.ranges.exponent_counts([x]),
        **_READS,
    }
    traced = {name: tf.function(function, autograph=False) for name, function in functions.items()}
    times = _times({name: lambda each=each: each(values).numpy() for name, each in traced.items()}, rounds)
    return {name: report.median_ratio(times["look"], times[name]) for name in _READS}


def step_ratios(rounds: int) -> dict[str, float]:
    """Return the time of training steps that can be looked at, divided by that of steps that cannot.

    Args:
        rounds: How often to measure.
    """
    steps, recordings = {}, {}
    for name in ("without ranges", "not looked at", "looked at"):
        steps[name], recordings[name] = _step(recorded=name != "without ranges")

    def looked_at() -> None:
        recordings["looked at"].request()
        steps["looked at"]()

    times = _times({**steps, "looked at": looked_at}, rounds)
    return {name: report.median_ratio(times[name], times["without ranges"]) for name in ("not looked at", "looked at")}


def _step(recorded: bool) -> tuple[Callable[[], None], Any]:
    """Return a training step of a dense net of 8 million weights, and the object that looks at it."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([1024]), *(keras.layers.Dense(1024, "relu") for _ in range(8))])
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(1e-3), tfmp.FixedLossScaleManager(1024.0))
    opt.build(model.trainable_variables)
    ranges = opt.record_gradient_ranges() if recorded else None
    x = tf.random.stateless_normal([64, 1024], [1, 2])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_mean(model(x, training=True) ** 2))
        variables = model.trainable_variables
        opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return step, ranges


def _times(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    sys.exit(main())
