"""Measures what `tfmp.autocast` saves of memory beside Keras' mixed_float16, and what it costs.

    python -m benchmarks.autocast

The first table is about a projection and a transformer of twelve blocks, without Dropout: its loss and its gradients,
in one `tf.function`. "raw" is written with TensorFlow's functions, in float32 and in autocast; "Keras" has layers of
Keras with the policies float32 and mixed_float16. Each contender has a process of its own. "peak" is the peak of what
TensorFlow's allocator has in use, weights included; on a CPU it counts tensors of 256 KiB or more. "time" is the median
of several calls. Both are divided by those of Keras' mixed_float16.

The second table is the time of an op in eager code, a product of two matrices of 8 x 8, divided by its time before
autocast was used: after a scope was left, in a scope that is off, and in a scope.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import peak_memory, report
from benchmarks.memory.nets import SIZES, Size, TransformerBlock

_BASE = "Keras, mixed_float16"
_TRAININGS = ("raw, float32", "raw, autocast", "Keras, float32", _BASE)
_CLASSES = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    trainings = {
        name: peak_memory.in_new_process(peak_and_time, name, options.size, options.rounds) for name in _TRAININGS
    }
    base = trainings[_BASE]
    rows = [[name, _ratio(peak, base[0]), _ratio(seconds, base[1])] for name, (peak, seconds) in trainings.items()]
    print(f"\n{report.table(['forward and backward', 'peak', 'time'], rows)}", flush=True)
    ops = peak_memory.in_new_process(op_ratios, options.rounds)
    print(f"\n{report.table(['an op in eager code', 'time'], [[name, f'{ratio:.2f}'] for name, ratio in ops.items()])}")
    report.write_json(options.json, {"conditions": conditions, "trainings": trainings, "ops": ops})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="full", help="size of the net (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each measurement (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


def _ratio(value: float | None, base: float | None) -> str:
    return "unknown" if value is None or not base else f"{value / base:.2f}"


def peak_and_time(name: str, size: str, rounds: int) -> tuple[int | None, float]:
    """Return the peak memory in bytes, None if it is not known, and the seconds of a call.

    Args:
        name: The contender.
        size: A key of `SIZES`.
        rounds: How often to measure the time.
    """
    kind, policy = name.split(", ")
    allocator = peak_memory.Allocator()
    call = (_raw if kind == "raw" else _keras)(SIZES[size]["transformer"], policy)
    call()
    peak = allocator.peak()
    return peak, statistics.median(_seconds(call) for _ in range(rounds))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _batch(size: Size) -> tuple[tf.Tensor, tf.Tensor]:
    x = tf.random.stateless_normal([size.batch, size.length, size.width], [1, 2])
    return x, tf.tile([tf.range(size.length) % _CLASSES], [size.batch, 1])


def _raw(size: Size, policy: str) -> Callable[[], float]:
    x, y = _batch(size)
    rng = np.random.default_rng(1)

    def weight(*shape: int) -> tf.Variable:
        return tf.Variable(rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32))

    width, heads = size.width, size.width // 32
    blocks = [
        {
            "norms": [(tf.Variable(tf.ones([width])), tf.Variable(tf.zeros([width]))) for _ in range(2)],
            "qkv": [(weight(width, heads, 32), tf.Variable(tf.zeros([heads, 1, 32]))) for _ in range(3)],
            "out": (weight(heads, 32, width), tf.Variable(tf.zeros([width]))),
            "dense": [
                (weight(width, 4 * width), tf.Variable(tf.zeros([4 * width]))),
                (weight(4 * width, width), tf.Variable(tf.zeros([width]))),
            ],
        }
        for _ in range(size.blocks)
    ]
    projection, head = weight(width, width), weight(width, _CLASSES)
    variables = [*tf.nest.flatten(blocks), projection, head]

    @tf.function
    def gradients() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape, tfmp.autocast(enabled=policy == "autocast"):
            hidden = _product(x, projection)
            for block in blocks:
                hidden = _raw_block(hidden, block)
            loss = _loss(y, _product(hidden, head))
        return loss, tape.gradient(loss, variables)

    return lambda: float(gradients()[0])


def _raw_block(x: tf.Tensor, block: dict[str, list[tuple[tf.Variable, tf.Variable]]]) -> tf.Tensor:
    normalized = _normalized(x, *block["norms"][0])
    q, k, v = (tf.einsum("btd,dhk->bhtk", normalized, kernel) + bias for kernel, bias in block["qkv"])
    scores = tf.nn.softmax(tf.einsum("bhtk,bhsk->bhts", q * 32**-0.5, k))
    kernel, bias = block["out"]
    x += tf.einsum("bthk,hkd->btd", tf.einsum("bhts,bhsk->bthk", scores, v), kernel) + bias
    (first, first_bias), (second, second_bias) = block["dense"]
    inner = tf.nn.gelu(_product(_normalized(x, *block["norms"][1]), first) + first_bias)
    return x + (_product(inner, second) + second_bias)


def _product(x: tf.Tensor, kernel: tf.Variable) -> tf.Tensor:
    return tf.einsum("btd,de->bte", x, kernel)


def _normalized(x: tf.Tensor, gamma: tf.Variable, beta: tf.Variable) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3) * gamma + beta


def _loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def _keras(size: Size, policy: str) -> Callable[[], float]:
    keras.config.set_dtype_policy(policy)
    x, y = _batch(size)
    blocks = [TransformerBlock(size.width, f"block_{index}") for index in range(size.blocks)]
    projection, head = (keras.layers.Dense(units, use_bias=False) for units in (size.width, _CLASSES))

    def forward() -> tf.Tensor:
        hidden = projection(x)
        for block in blocks:
            hidden = block(hidden, training=False)
        return _loss(y, tf.cast(head(hidden), tf.float32))

    # Layers make their variables when they are called first.
    tf.function(forward)()
    variables = [each.value for layer in [projection, *blocks, head] for each in layer.trainable_variables]

    @tf.function
    def gradients() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = forward()
        return loss, tape.gradient(loss, variables)

    return lambda: float(gradients()[0])


def op_ratios(rounds: int, calls: int = 2000) -> dict[str, float]:
    """Return the time of an op, divided by its time before autocast was used.

    Args:
        rounds: How often to measure.
        calls: The ops of a round.
    """
    x = tf.ones([8, 8])
    off, on = tfmp.autocast(enabled=False), tfmp.autocast()

    def ops() -> float:
        return _seconds(lambda: [tf.matmul(x, x) for _ in range(calls)])

    ops()
    never = [ops() for _ in range(rounds)]
    times: dict[str, list[float]] = {"never": never, "after a scope": [], "scope that is off": [], "scope": []}
    for _ in range(rounds):
        with on:
            times["scope"].append(ops())
        with off:
            times["scope that is off"].append(ops())
        times["after a scope"].append(ops())
    return {name: statistics.median(each) / statistics.median(never) for name, each in times.items()}


if __name__ == "__main__":
    sys.exit(main())
