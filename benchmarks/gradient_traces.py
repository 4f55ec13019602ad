"""Traces of gradients: the largest magnitude among the gradients of each step of a training, recorded or made up.

    python -m benchmarks.gradient_traces

This command records the trace in `recordings/digits_float16.json` again, in ten seconds. The training is an MLP with
float16 layers and gradients that classifies scikit-learn's digits.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from benchmarks.harness import report

_RECORDING = Path(__file__).parent / "recordings" / "digits_float16.json"

_STEPS, _BATCH, _LEARNING_RATE, _MOMENTUM = 4000, 64, 0.1, 0.9

#: The loss scale while a trace is recorded. With it, no step overflows and few gradients underflow to 0.
_SCALE = 2.0**8

_WIDTHS = (64, 128, 64, 10)


def traces(steps: int) -> dict[str, np.ndarray]:
    """Return the largest magnitude of each step, by the names of the traces.

    A magnitude of infinity is a step that overflows whatever the scale is.

    Args:
        steps: The number of steps, up to 4000.

    Examples:
        >>> {magnitudes.shape for magnitudes in traces(5).values()}
        {(5,)}
    """
    made = {name: make(np.arange(steps) / steps, np.random.default_rng(0)) for name, make in _MADE.items()}
    recorded = np.float32(json.loads(_RECORDING.read_text())["max_abs"][:steps])
    return {"digits, recorded": recorded} | made


def _around(rng: np.random.Generator, exponents: np.ndarray, deviation: float = 0.5) -> np.ndarray:
    return np.float32(2.0 ** (exponents + deviation * rng.normal(size=len(exponents))))


def _shrinking(time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _around(rng, 2 - 20 * time)


def _growing(time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _around(rng, -18 + 20 * time)


def _spikes(time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _around(rng, -8 + 8.0 * (rng.random(len(time)) < 1 / 200))


def _zeros(time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(len(time)) < 1 / 50, 0, _around(rng, np.full(len(time), -8.0)))


def _first_overflows(time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(np.arange(len(time)) < 10, np.inf, _around(rng, -8 + 6 * np.exp(-20 * time)))


def _one_overflow(time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(np.arange(len(time)) == len(time) // 4, np.inf, _around(rng, np.full(len(time), -8.0)))


def _large(time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _around(rng, np.full(len(time), 20.0))


_MADE: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "shrinking by 2^20": _shrinking,
    "growing by 2^20": _growing,
    "spikes": _spikes,
    "all-zero steps": _zeros,
    "10 overflows first": _first_overflows,
    "one overflow": _one_overflow,
    "above float16": _large,
}


def record(steps: int = _STEPS) -> list[float]:
    """Train, and return the largest magnitude among the unscaled gradients of each step.

    Args:
        steps: The number of steps.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = np.float16(digits.data / 16), np.int32(digits.target)
    rng = np.random.default_rng(0)
    weights = [
        tf.Variable(np.float32(rng.normal(size=shape) * np.sqrt(2 / shape[0]))) for shape in itertools.pairwise(_WIDTHS)
    ]
    velocities = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    @tf.function
    def step(batch: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        layers = [tf.cast(weight, tf.float16) for weight in weights]
        with tf.GradientTape() as tape:
            tape.watch(layers)
            hidden = batch
            for layer in layers[:-1]:
                hidden = tf.nn.relu(hidden @ layer)
            logits = tf.cast(hidden @ layers[-1], tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = _SCALE * tf.reduce_mean(losses)
        grads = [tf.cast(grad, tf.float32) / _SCALE for grad in tape.gradient(loss, layers)]
        for weight, velocity, grad in zip(weights, velocities, grads, strict=True):
            velocity.assign(_MOMENTUM * velocity + grad)
            weight.assign_sub(_LEARNING_RATE * velocity)
        return tf.reduce_max([tf.reduce_max(tf.abs(grad)) for grad in grads])

    return [float(step(images[chosen], labels[chosen])) for chosen in rng.integers(len(images), size=[steps, _BATCH])]


def main(argv: Sequence[str] | None = None) -> int:
    """Record a trace, and write it to a file.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=_RECORDING, help="the file to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=_STEPS, help="the number of steps (default: %(default)s)")
    options = parser.parse_args(argv)
    conditions = report.printed_conditions()
    max_abs = [float(f"{value:.4g}") for value in record(options.steps)]
    print(f"largest gradients from {min(max_abs)} to {max(max_abs)}")
    kept = {name: conditions[name] for name in ("machine", "versions")}
    options.json.write_text(json.dumps({"conditions": kept, "max_abs": max_abs}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
