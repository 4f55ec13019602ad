"""Measures what the device can do at most: products of matrices in each type, and copies in its memory.

    python -m benchmarks.chip_limits --json chip_limits.json

It runs on the first GPU, or on the CPU if there is none. The times of steps can be compared with these: a step that
moves a gigabyte takes no less than a copy of half a gigabyte, which reads and writes it. "float32" has exact products;
"TensorFloat-32" is float32 with rounded ones, which is TensorFlow's default on GPUs and does not exist on CPUs. The
first call takes long where TensorFlow has no kernels for the chip and compiles them: half an hour on some new ones.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.harness import contest, report
from benchmarks.harness.peak_memory import device_of_allocator

#: The types of products: the type of the matrices, and whether the products of float32 are rounded.
_TYPES = {
    "float32": (tf.float32, False),
    "TensorFloat-32": (tf.float32, True),
    "bfloat16": (tf.bfloat16, False),
    "float16": (tf.float16, False),
}
#: The default rows of the matrices, and bytes of the copy, on each kind of device.
_SIZES = {"GPU": (8192, 2**30), "CPU": (512, 2**26)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    device = device_of_allocator()
    rows, size = _SIZES[device[:3]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=rows, help="rows of the matrices (default here: %(default)s)")
    parser.add_argument("--bytes", type=int, default=size, help="bytes to copy (default here: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="times that each is measured (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"conditions": report.printed_conditions(), "device": device}
    with tf.device(device):
        figures["products"] = products(options.rows, options.rounds, rounded=device.startswith("GPU"))
        figures["copy"] = copy(options.bytes, options.rounds)
    print(f"\nOn {device}, products of matrices of {options.rows} rows:\n")
    cells = [
        [name, f"{1000 * each['seconds']:.2f}", f"{each['per_second'] / 1e12:.2f}", f"{each['first_call']:.1f}"]
        for name, each in figures["products"].items()
    ]
    print(report.table(["type", "ms", "TFLOP/s", "first call, s"], cells))
    copied = figures["copy"]
    print(f"\nA copy of {options.bytes / 2**20:.0f} MiB reads and writes {copied['per_second'] / 1e9:.0f} GB/s.")
    report.write_json(options.json, figures)
    return 0


def products(rows: int, rounds: int, *, rounded: bool) -> dict[str, dict[str, float]]:
    """Return the time of a product of matrices in each type, and the operations in a second.

    Args:
        rows: The rows and columns of the matrices.
        rounds: How many times each is measured.
        rounded: Whether the device can round what it multiplies.
    """
    found = {}
    matrix = tf.random.stateless_normal([rows, rows], seed=[1, 2])
    for name, (dtype, rounds_products) in _TYPES.items():
        if rounds_products and not rounded:
            continue
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(rounds_products)
        factor = tf.cast(matrix, dtype)
        found[name] = _measured(lambda factor=factor: tf.matmul(factor, factor), 2 * rows**3, rounds)
        tf.config.experimental.enable_tensor_float_32_execution(before)
    return found


def copy(size: int, rounds: int) -> dict[str, float]:
    """Return the time of a copy, and the bytes that are read and written in a second.

    Args:
        size: The bytes to copy.
        rounds: How many times it is measured.
    """
    source = tf.zeros([size // 4])
    return _measured(lambda: tf.raw_ops.DeepCopy(x=source), 2 * size, rounds)


def _measured(run: Callable[[], tf.Tensor], amount: float, rounds: int) -> dict[str, float]:
    def step() -> None:
        run()
        tf.test.experimental.sync_devices()

    first = contest.seconds_of(step)
    seconds = statistics.median(contest.seconds_of(step) for _ in range(rounds))
    return {"first_call": first, "seconds": seconds, "per_second": amount / seconds}


if __name__ == "__main__":
    sys.exit(main())
