"""Simulates the rounding errors when many workers average gradients in float16.

    python -m benchmarks.ring_sums --json rings.json --plot rings.png

No processes are started: NumPy repeats the arithmetic of Horovod's ring. Each worker divides its scaled gradients by
the number of workers and casts them. The ring then adds the gradients of one worker after the other, and rounds each
partial sum.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.harness import report

#: Magnitudes of gradients have a log-normal distribution: its median, and the standard deviation of the logarithm.
_MEDIAN, _DEVIATION = 1e-6, 2.0

#: The magnitude of the part of a gradient that all workers have in common; each worker's own part has deviation 1.
_IN_COMMON = 0.1

#: The numbers of workers in the simulated rings.
_WORKERS = tuple(2**power for power in range(1, 11))

#: The exponents of the loss scales that are tried, which are powers of two.
_POWERS = range(40)

#: A scale is too low if a larger share of the mean's elements than this becomes zero.
_LOST_AT_MOST = 0.01


def worker_gradients(worker: int, count: int) -> np.ndarray:
    """Return gradients of one worker; their magnitudes differ widely, and most of each is noise of this worker.

    Args:
        worker: The number of the worker.
        count: The number of gradients.

    Examples:
        >>> worker_gradients(0, 3).shape
        (3,)
    """
    of_all, own = np.random.default_rng(0), np.random.default_rng([1, worker])
    magnitudes = of_all.lognormal(np.log(_MEDIAN), _DEVIATION, count)
    in_common = _IN_COMMON * of_all.choice([-1.0, 1.0], count)
    return np.float32(magnitudes * (in_common + own.normal(size=count)))


def ring_mean(grads: np.ndarray, dtype: Any, divide_first: bool = True) -> np.ndarray:  # noqa: ANN401 - NumPy's
    """Return the mean as a ring of workers computes it, in float64.

    Args:
        grads: The gradients in float32, with a row for each worker.
        dtype: The type in which gradients are sent and added.
        divide_first: Whether to divide by the number of workers before the cast and the sum, as tfmp does, or after
            both.

    Examples:
        >>> grads = np.full([4, 1], 60000.0, np.float32)
        >>> ring_mean(grads, np.float16), ring_mean(grads, np.float16, divide_first=False)
        (array([60000.]), array([inf]))
    """
    workers, count = grads.shape
    # In a ring, the sum of each part of the gradients starts at a different worker.
    first = np.arange(count) * workers // count
    in_turn = (first + np.arange(workers)[:, None]) % workers
    # Overflows are expected: the caller looks for them.
    with np.errstate(over="ignore", invalid="ignore"):
        parts = (grads / np.float32(workers) if divide_first else grads).astype(dtype)
        total, *others = np.take_along_axis(parts, in_turn, axis=0)
        for part in others:
            total = total + part
    return np.float64(total) / (1 if divide_first else workers)


def relative_error(values: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the differences, divided by the norm of the expected values.

    Examples:
        >>> relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0]))
        0.2
    """
    return float(np.linalg.norm(np.float64(values) - expected) / np.linalg.norm(expected))


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    rings = [_simulate_ring(count, options.gradients) for count in _WORKERS]
    print(f"\n{_rings_text(rings)}\n\n{_scales_text(rings)}")
    report.write_json(options.json, {"conditions": conditions, "rings": rings})
    if options.plot:
        _plot(rings, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gradients", type=int, default=4096, help="gradients of a simulated worker (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    return parser


def _simulate_ring(workers: int, count: int) -> dict[str, Any]:
    grads = np.stack([worker_gradients(worker, count) for worker in range(workers)])
    mean = np.mean(grads, axis=0, dtype=np.float64)

    def shared(power: int, divide_first: bool = True, dtype: Any = np.float16) -> np.ndarray:  # noqa: ANN401 - NumPy's
        return ring_mean(grads * np.float32(2.0**power), dtype, divide_first) / 2.0**power

    def lost(power: int) -> float:
        return float(np.mean((shared(power) == 0) & (mean != 0)))

    def highest(divide_first: bool) -> int:
        return next(power for power in reversed(_POWERS) if np.isfinite(shared(power, divide_first)).all())

    scale = highest(divide_first=True)
    same = np.repeat(grads[:1], workers, axis=0)
    bfloat16 = tf.bfloat16.as_numpy_dtype
    return {
        "workers": workers,
        "lowest_scale": next(power for power in _POWERS if lost(power) <= _LOST_AT_MOST),
        "highest_scale": scale,
        "highest_scale_divided_after": highest(divide_first=False),
        "lost": {power: lost(power) for power in (0, 8, 16)},
        "error": {power: relative_error(shared(power), mean) for power in (0, 8, 16)},
        "error_at_highest_scale": relative_error(shared(scale), mean),
        "error_in_float32": relative_error(shared(0, dtype=np.float32), mean),
        "error_in_bfloat16": relative_error(shared(0, dtype=bfloat16), mean),
        "error_of_same": relative_error(ring_mean(same * np.float32(2.0**16), np.float16) / 2.0**16, same[0]),
        "error_of_same_in_bfloat16": relative_error(ring_mean(same, bfloat16), same[0]),
    }


def _rings_text(rings: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            str(ring["workers"]),
            f"{ring['error_in_float32']:.1e}",
            f"{ring['error_at_highest_scale']:.1e}",
            f"{ring['error'][16]:.1e}",
            f"{ring['error'][8]:.1e}",
            f"{ring['error'][0]:.1e}",
            f"{ring['error_in_bfloat16']:.1e}",
            f"{ring['error_of_same']:.1e}",
            f"{ring['error_of_same_in_bfloat16']:.1e}",
        ]
        for ring in rings
    ]
    scales = ["float16, best", "float16, 2^16", "2^8", "1"]
    header = ["workers", "float32", *scales, "bfloat16", "float16, all alike", "bfloat16, all alike"]
    return f"Relative error of the mean, by type and loss scale\n{report.table(header, rows)}"


def _scales_text(rings: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            str(ring["workers"]),
            *(f"{100 * ring['lost'][power]:.1f}" for power in (0, 8, 16)),
            f"2^{ring['lowest_scale']}",
            f"2^{ring['highest_scale']}",
            f"2^{ring['highest_scale_divided_after']}",
        ]
        for ring in rings
    ]
    lost = [f"% lost at {scale}" for scale in ("1", "2^8", "2^16")]
    header = ["workers", *lost, "lowest scale", "highest", "highest, divided after"]
    return (
        f"Float16: what becomes zero, and between which loss scales at most {_LOST_AT_MOST:.0%} does and nothing "
        f"overflows\n{report.table(header, rows)}"
    )


def _plot(rings: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, (errors, scales) = pyplot.subplots(1, 2, figsize=(10, 4.5))
    workers = [ring["workers"] for ring in rings]
    for key, label in (
        ("error_in_float32", "float32"),
        ("error_at_highest_scale", "float16, best scale"),
        ("error_of_same", "float16, all gradients alike"),
        ("error_in_bfloat16", "bfloat16"),
        ("error_of_same_in_bfloat16", "bfloat16, all gradients alike"),
    ):
        errors.loglog(workers, [ring[key] for ring in rings], marker="o", label=label, base=2)
    errors.set_yscale("log")
    errors.set(xlabel="simulated workers", ylabel="relative error of the mean")
    errors.set_title("Sums rounded in a ring")
    lowest = [ring["lowest_scale"] for ring in rings]
    highest = [ring["highest_scale"] for ring in rings]
    scales.fill_between(workers, lowest, highest, alpha=0.2)
    scales.plot(workers, highest, marker="o", label="highest that does not overflow")
    after = [ring["highest_scale_divided_after"] for ring in rings]
    scales.plot(workers, after, marker="o", label="the same, divided after the sum")
    scales.plot(workers, lowest, marker="o", label=f"lowest that loses at most {_LOST_AT_MOST:.0%}")
    scales.set_xscale("log", base=2)
    scales.set(xlabel="simulated workers", ylabel="loss scale, as a power of two")
    scales.set_title("Loss scales for float16")
    for axes, place in ((errors, (0.3, 0.25)), (scales, (0.2, 0.4))):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc=place)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
