"""Replays traces of gradients through strategies that decide the loss scale.

    python -m benchmarks.strategies --json strategies.json --plot docs/images/strategies.png

A step is lost if the largest gradient times the scale is above 65504, the largest number in float16. For the steps that
are applied, the benchmark reports the unused part of float16's range: the mean of log2(65504 / (largest gradient *
scale)), in bits. If the largest gradient underflows to 0 in float16, the strategy sees 0. "LogMax, original" is
OpenSeq2Seq's rule, written in NumPy.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tfmp
from benchmarks import gradient_traces
from benchmarks.harness import report

_LARGEST = 65504.0

# Half of the smallest positive number in float16. It and all smaller numbers round to 0.
_VANISHES = 2.0**-25


class Replay(NamedTuple):
    """The results of a strategy on all traces.

    Attributes:
        scales: The scale of each step; the axes are step and trace.
        lost: The number of steps that overflowed, for each trace.
        unused_bits: The unused part of float16's range, for each trace; None if no step was applied.
    """

    scales: np.ndarray
    lost: list[int]
    unused_bits: list[float | None]


def outcome(max_abs: Any, scale: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of NumPy or TensorFlow
    """Return whether a step is finite, and whether all its gradients underflow to 0 in float16.

    Args:
        max_abs: The largest magnitude among the step's gradients.
        scale: The loss scale.

    Examples:
        >>> outcome(np.float32([1, 0.5, 2**-42]), 2.0**17)
        (array([False, False,  True]), array([False, False, False]))
        >>> outcome(2.0**-42, 2.0**16)
        (True, True)
    """
    # A product with a scale of NaN is not finite either.
    return max_abs * scale <= _LARGEST, max_abs * scale < _VANISHES


def replay(strategy: Callable[[np.ndarray], np.ndarray], max_abs: np.ndarray) -> Replay:
    """Replay traces through a strategy.

    Args:
        strategy: A function from the largest magnitudes to the scale of each step.
        max_abs: The largest magnitudes; the axes are step and trace.

    Examples:
        >>> replay(fixed(32752), np.float32([[1], [2], [0], [4]]))[1:]
        ([1], [0.5])
    """
    scales = strategy(max_abs)
    finite, _ = outcome(max_abs, scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        unused = np.where(finite & (max_abs > 0), np.log2(_LARGEST / (max_abs * scales)), np.nan)
    counted = np.sum(~np.isnan(unused), axis=0)
    bits = [float(total / count) if count else None for total, count in zip(np.nansum(unused, 0), counted, strict=True)]
    return Replay(scales, [int(lost) for lost in np.sum(~finite, axis=0)], bits)


def fixed(scale: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return the strategy that never changes the scale.

    Args:
        scale: The loss scale of every step.
    """
    return lambda max_abs: np.full_like(max_abs, scale)


def managed(manager: Any) -> Callable[[np.ndarray], np.ndarray]:  # noqa: ANN401 - either class with a `next_state`
    """Return the strategy that a manager implements.

    Args:
        manager: A manager with a state, which means any that changes the scale.
    """

    @tf.function
    def states(max_abs: tf.Tensor) -> Any:  # noqa: ANN401 - the state of either class
        def step(state: Any, magnitude: tf.Tensor) -> Any:  # noqa: ANN401
            finite, vanishes = outcome(magnitude, state.loss_scale)
            observed = [tf.where(vanishes, 0.0, magnitude)] if manager.needs_max_abs else []
            return manager.next_state(state, finite, *observed)

        first = manager.state.read()
        traces = max_abs.shape[1:]
        return tf.scan(step, max_abs, type(first)(*(tf.fill(traces, field) for field in first)))

    def scales(max_abs: np.ndarray) -> np.ndarray:
        after = states(tf.constant(max_abs)).loss_scale.numpy()
        first = np.full_like(after[:1], manager.get_loss_scale().numpy())
        return np.concatenate([first, after[:-1]])

    return scales


def original_log_max(max_abs: np.ndarray) -> np.ndarray:
    """Return the scales of OpenSeq2Seq's LogMax with its defaults, in float32.

    Its statistics are of x, the log2 of the largest magnitude. They count an overflow as x = 2**16, and gradients of 0
    as x = -infinity.

    Args:
        max_abs: The largest magnitudes; the axes are step and trace.

    Examples:
        >>> original_log_max(np.float32([[1], [1], [1], [0], [1]]))[:, 0].tolist()
        [1.0, 65536.0, 1.0, 1.0, nan]
    """
    mean_decay, square_decay = np.float32(0.99), np.float32(0.999)
    scale = np.ones_like(max_abs[0])
    mean, slow_mean, squares = (np.zeros_like(scale) for _ in range(3))
    scales = []
    with np.errstate(all="ignore"):
        for step, magnitude in enumerate(max_abs, start=1):
            scales.append(scale)
            finite, vanishes = outcome(magnitude, scale)
            x = np.where(finite, np.log2(np.where(vanishes, np.float32(0), magnitude)), np.float32(2**16))
            mean = mean_decay * mean + (1 - mean_decay) * x
            slow_mean = square_decay * slow_mean + (1 - square_decay) * x
            squares = square_decay * squares + (1 - square_decay) * x * x
            correction = 1 - square_decay**step
            variance = np.maximum(squares / correction - (slow_mean / correction) ** 2, 0)
            proposed = np.float32(16) - mean / (1 - mean_decay**step) - np.float32(3.09) * np.sqrt(variance)
            scale = np.clip(np.exp2(proposed), np.float32(1), np.float32(2**24))
    return np.stack(scales)


_HALVING = {"decr_every_n_nan_or_inf": 1, "incr_ratio": 2, "decr_ratio": 0.5}


def strategies(window: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return all strategies, under their names.

    Args:
        window: Finite steps in a row after which a scale grows.
    """

    def doubling(**settings: Any) -> Callable[[np.ndarray], np.ndarray]:  # noqa: ANN401 - any setting
        return managed(tfmp.ExponentialUpdateLossScaleManager(2**16, window, **_HALVING, **settings))

    return {
        "fixed, 2^10": fixed(2.0**10),
        "contrib's defaults, from 2^32": managed(tfmp.ExponentialUpdateLossScaleManager(2**32, window)),
        "halving, doubling, from 2^16": doubling(),
        "... hysteresis 2": doubling(hysteresis=2),
        "... hysteresis 2, consecutive": doubling(hysteresis=2, consecutive_hysteresis=True),
        "... tolerance 0.05": doubling(tolerance=0.05),
        "... bounds 2^-24 and 2^20": doubling(min_loss_scale=2**-24, max_loss_scale=2**20),
        "LogMax": managed(tfmp.LogMaxLossScaleManager(incr_every_n_steps=window)),
        "LogMax, from 2^-24": managed(tfmp.LogMaxLossScaleManager(incr_every_n_steps=window, min_loss_scale=2**-24)),
        "LogMax, original": original_log_max,
    }


# The strategies in the plot. A strategy whose line another one covers is left out.
_COLORS = {
    "fixed, 2^10": "tab:purple",
    "contrib's defaults, from 2^32": "tab:orange",
    "halving, doubling, from 2^16": "tab:blue",
    "... tolerance 0.05": "black",
    "LogMax, from 2^-24": "tab:green",
    "LogMax, original": "tab:red",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the traces and print the results.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    traces = gradient_traces.traces(options.steps)
    max_abs = np.stack(list(traces.values()), axis=1).astype(np.float32)
    replays = {}
    chosen = strategies(options.window)
    for number, (name, strategy) in enumerate(chosen.items(), start=1):
        replays[name] = replay(strategy, max_abs)
        print(f"{name} (strategy {number} of {len(chosen)})", flush=True)
    print(f"\nSteps lost of {options.steps}, and bits unused\n{_table(list(traces), replays)}")
    figures = {
        name: {
            "lost": dict(zip(traces, made.lost, strict=True)),
            "unused_bits": dict(zip(traces, made.unused_bits, strict=True)),
        }
        for name, made in replays.items()
    }
    report.write_json(options.json, {"conditions": conditions, "figures": figures})
    if options.plot:
        _plot(traces, replays, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=4000, help="steps of each trace, up to 4000 (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, default=500, help="finite steps before growth (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--plot", type=Path, help="a file to draw the scales in; needs matplotlib")
    return parser


def _table(traces: Sequence[str], replays: dict[str, Replay]) -> str:
    rows = [
        [name, *(f"{lost}; {_text(bits)}" for lost, bits in zip(made.lost, made.unused_bits, strict=True))]
        for name, made in replays.items()
    ]
    return report.table(["strategy", *traces], rows)


def _text(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.1f}"


def _plot(traces: dict[str, np.ndarray], replays: dict[str, Replay], path: Path) -> None:
    from matplotlib import pyplot

    columns = 2
    rows = -(-len(traces) // columns)
    figure, all_axes = pyplot.subplots(rows, columns, figsize=(11, 2.6 * rows), sharex=True, squeeze=False)
    for number, (axes, (title, max_abs)) in enumerate(zip(all_axes.flat, traces.items(), strict=False)):
        with np.errstate(divide="ignore"):
            highest = np.log2(_LARGEST / max_abs)
        axes.plot(highest, ".", color="0.6", markersize=2, label="highest that does not overflow")
        for name, color in _COLORS.items():
            scales = np.log2(replays[name].scales[:, number])
            axes.plot(scales, "--" if name.startswith("...") else "-", color=color, label=name, linewidth=1.6)
            if np.isnan(scales).any():
                step = int(np.argmax(np.isnan(scales)))
                axes.plot(step - 1, scales[step - 1], "x", color=color, markersize=9, markeredgewidth=2)
        axes.set_title(title, fontsize="medium")
        axes.set(ylim=(-10, 34))
        axes.grid(alpha=0.3)
    for axes in all_axes[:, 0]:
        axes.set_ylabel("log2 of the scale")
    for axes in all_axes[-1]:
        axes.set_xlabel("step")
    figure.legend(
        *all_axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize="small", markerscale=4
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
