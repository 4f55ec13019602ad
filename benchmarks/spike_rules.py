"""Replays recorded gradient norms through rules that detect spikes, and counts false alarms and missed spikes.

    python -m benchmarks.spike_rules --json spike_rules.json

A spike is a step whose gradients are finite, but whose norm is an outlier among the norms of the steps before. A rule
compares each norm with a window of earlier norms, and raises an alarm if the norm is above a bound; with an alarm the
step would be skipped. No rule raises an alarm before its window is full; OLMo-core's begins when it is half full. After
10 alarms in a row, steps are applied until a norm is within the bound again.

The recordings are norms of unscaled gradients, before clipping, of steps that were applied in clean training runs: the
BERT of the examples and a smaller one, the critic and the generator of the GAN of the examples, and dense nets on
digits, with usual and with high learning rates. Every rule replays them as they are, where each alarm is a false one,
and with these changes:

* found: the norm of every 50th step is replaced by a multiple of the median of the 128 norms before it. The figure is
  the share of these spikes with an alarm.
* masked: from the first step on, the norm of every 30th or 10th step is 10 times as large as it was. These spikes enter
  the window while it fills, and can hide later ones. The figure is the share of the spikes with an alarm.
* periodic: the norm of every 16th step is 5 times as large as it was, as by an additional loss. These steps should not
  be skipped. The figure is the share of them with an alarm.
* lasting: from the middle on, all norms are 5 times as large as they were. The figure is the number of alarms in the
  300 steps that follow.

Shares are means over the trainings. Steps are counted after the first 128. The weights of the recorded runs do not
react to the steps that a rule would skip.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import report

_RECORDINGS = Path(__file__).parent / "recordings" / "gradient_norms.npz"

_MAX_CONSECUTIVE_SKIPS = 10
_WINDOWS = (64, 128)
#: Steps are counted from this one on for all windows, so that their figures are of the same steps.
_FIRST_COUNTED = max(_WINDOWS)

_PLANTED_EVERY, _FACTORS = 50, (5, 10, 30)
_MASKED_EVERY, _MASKED_FACTOR = (30, 10), 10
_PERIOD, _PERIODIC_FACTOR = 16, 5
_LASTING_FACTOR, _STEPS_AFTER = 5, 300

#: The trainings in each table. The norms of the second group spread more, up to decades.
_GROUPS = {
    "BERT and GAN": ("bert", "bert_small", "gan_critic", "gan_generator"),
    "Digits": ("digits_adam", "digits_adam_high", "digits_sgd", "digits_sgd_high"),
}

#: The standard deviation of a normal distribution, divided by its median distance from the median.
_DEVIATION_OF_NORMAL = 1.4826


class Rule(NamedTuple):
    """A rule that detects spikes.

    Attributes:
        bound: Returns the largest norm without an alarm, given windows of norms along the last axis.
        keeps_spikes: Whether the norms of steps with an alarm enter the window too.
    """

    bound: Callable[[np.ndarray], np.ndarray]
    keeps_spikes: bool = False


class Alarms(NamedTuple):
    """The alarms of a rule in the runs of one training.

    Attributes:
        steps: The number of counted steps.
        false: The number of alarms in them, in the recordings as they are.
        found: The share of planted spikes with an alarm, by their size.
        masked: The share of spikes with an alarm where they come from the first step on, by the steps between two.
        periodic: The share of the large norms of the pattern with an alarm.
        lasting: The mean number of alarms in the 300 steps after a lasting change.
    """

    steps: int
    false: int
    found: dict[int, float]
    masked: dict[int, float]
    periodic: float
    lasting: float


def above_mean(windows: np.ndarray) -> np.ndarray:
    """Return the mean and 6 standard deviations.

    Examples:
        >>> round(float(above_mean(np.array([1.0, 3.0]))), 4)
        10.4853
    """
    return windows.mean(axis=-1) + 6 * windows.std(axis=-1, ddof=1)


def above_log_mean(windows: np.ndarray) -> np.ndarray:
    """Return the mean of the logarithms and 4 standard deviations, at least 3 times the mean.

    Examples:
        >>> round(float(above_log_mean(np.array([2.0, 2.0]))), 4)
        6.0
    """
    logarithms = np.log(windows)
    return np.exp(logarithms.mean(axis=-1) + np.maximum(4 * logarithms.std(axis=-1, ddof=1), math.log(3)))


def above_log_median(windows: np.ndarray) -> np.ndarray:
    """Return the bound of `tfmp.SpikeDetector()`.

    Examples:
        >>> round(float(above_log_median(np.array([2.0, 1.0, 8.0]))), 3)  # 2 * 2**(4 * 1.4826)
        121.971
    """
    logarithms = np.log(windows)
    median = _median(logarithms)
    deviation = _DEVIATION_OF_NORMAL * _median(np.abs(logarithms - median[..., np.newaxis]))
    return np.exp(median + np.maximum(4 * deviation, math.log(3)))


def _median(windows: np.ndarray) -> np.ndarray:
    # numpy.median gives the same, and is many times slower on many short rows.
    ordered, length = np.sort(windows, axis=-1), windows.shape[-1]
    return (ordered[..., (length - 1) // 2] + ordered[..., length // 2]) / 2


#: The last one is that of tfmp.
RULES = {
    "mean + 6 deviations, all norms enter (OLMo-core)": Rule(above_mean, keeps_spikes=True),
    "mean + 6 deviations": Rule(above_mean),
    "mean of logarithms + 4 deviations, 3 times": Rule(above_log_mean),
    "median of logarithms + 4 deviations, 3 times (tfmp)": Rule(above_log_median),
}


def alarms(norms: np.ndarray, rule: Rule, window: int) -> np.ndarray:
    """Replay series of norms through a rule.

    Args:
        norms: The norms; the axes are step and series. A series that ends early is filled up with NaN.
        rule: The rule.
        window: The number of norms that each is compared with.

    Returns:
        Whether each norm raises an alarm, of the shape of the norms.

    Examples:
        >>> norms = np.array([[1.0], [3.0], [2.0], [90.0], [2.0]])
        >>> alarms(norms, Rule(above_mean), window=3)[:, 0].tolist()
        [False, False, False, True, False]
    """
    series = np.arange(norms.shape[1])
    windows = np.ones((len(series), window))
    entered, in_a_row = np.zeros(len(series), int), np.zeros(len(series), int)
    found = np.zeros(norms.shape, bool)
    for step, values in enumerate(norms):
        is_above = (entered >= window) & (values > rule.bound(windows))
        found[step] = is_above & (in_a_row < _MAX_CONSECUTIVE_SKIPS)
        in_a_row = np.where(is_above, in_a_row + 1, 0)
        enters = series[~found[step] | rule.keeps_spikes]
        windows[enters, entered[enters] % window] = values[enters]
        entered[enters] += 1
    return found


def alarms_of_training(runs: Sequence[np.ndarray], rule: Rule, window: int) -> Alarms:
    """Replay the runs of one training as they are and with the changes, and count the alarms.

    Args:
        runs: The norms of each run.
        rule: The rule.
        window: The number of norms that each is compared with.
    """
    length = max(map(len, runs))
    norms = np.stack([np.pad(run, (0, length - len(run)), constant_values=np.nan) for run in runs], axis=1)
    steps = np.arange(length)[:, np.newaxis]
    counted = np.isfinite(norms) & (steps >= _FIRST_COUNTED)
    planted = counted & (steps % _PLANTED_EVERY == 0)
    masked = {every: np.broadcast_to(steps % every == every - 1, norms.shape) for every in _MASKED_EVERY}
    periodic = np.broadcast_to(steps % _PERIOD == 0, norms.shape)
    after = steps - np.array([max(len(run) // 2, _FIRST_COUNTED) for run in runs])
    changed = [
        norms,
        *(np.where(planted, factor * _typical(norms), norms) for factor in _FACTORS),
        *(np.where(each, _MASKED_FACTOR * norms, norms) for each in masked.values()),
        np.where(periodic, _PERIODIC_FACTOR * norms, norms),
        np.where(after >= 0, _LASTING_FACTOR * norms, norms),
    ]
    of_each = np.split(alarms(np.concatenate(changed, axis=1), rule, window), len(changed), axis=1)
    of_clean, of_planted, of_masked = of_each[0], of_each[1 : 1 + len(_FACTORS)], of_each[1 + len(_FACTORS) : -2]
    is_masked = zip(masked.items(), of_masked, strict=True)
    return Alarms(
        steps=int(counted.sum()),
        false=int(of_clean[counted].sum()),
        found={factor: float(each[planted].mean()) for factor, each in zip(_FACTORS, of_planted, strict=True)},
        masked={every: float(each[counted & chosen].mean()) for (every, chosen), each in is_masked},
        periodic=float(of_each[-2][counted & periodic].mean()),
        lasting=float(of_each[-1][(after >= 0) & (after < _STEPS_AFTER)].sum() / len(runs)),
    )


def _typical(norms: np.ndarray) -> np.ndarray:
    """Return the median of the 128 norms before each, of the shape of the norms; infinity where there are fewer."""
    medians = np.full_like(norms, np.inf)
    medians[_FIRST_COUNTED:] = _median(np.lib.stride_tricks.sliding_window_view(norms, _FIRST_COUNTED, axis=0)[:-1])
    return medians


def recordings() -> dict[str, list[np.ndarray]]:
    """Read the norms of each run, by the name of the training.

    The file has an array for each run, whose name is that of the training, a slash and the seed, and beside them a text
    that says on what they were recorded.

    Examples:
        >>> sorted(recordings())[:2]
        ['bert', 'bert_small']
    """
    found: dict[str, list[np.ndarray]] = {}
    with np.load(_RECORDINGS) as file:
        for name in file.files:
            if name != "conditions":
                found.setdefault(name.partition("/")[0], []).append(file[name].astype(np.float64))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, and print the figures.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="the number of steps of each run; by default all")
    parser.add_argument("--json", type=Path, help="a file to write the figures to, by training")
    options = parser.parse_args(argv)
    conditions = report.printed_conditions()
    norms = {name: [run[: options.steps] for run in runs] for name, runs in recordings().items()}
    figures = {
        (name, window): {training: alarms_of_training(runs, rule, window) for training, runs in norms.items()}
        for name, rule in RULES.items()
        for window in _WINDOWS
    }
    for group, trainings in _GROUPS.items():
        steps = sum(each.steps for name, each in next(iter(figures.values())).items() if name in trainings)
        runs = sum(len(norms[name]) for name in trainings)
        print(f"\n{group}: {runs} runs, {steps} counted steps\n")
        print(report.table(*_rows(figures, trainings)))
    report.write_json(
        options.json,
        {
            "conditions": conditions,
            "figures": [
                {"rule": name, "window": window, "trainings": {key: each._asdict() for key, each in found.items()}}
                for (name, window), found in figures.items()
            ],
        },
    )
    return 0


def _rows(
    figures: dict[tuple[str, int], dict[str, Alarms]], trainings: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    header = [
        *("rule", "window", "false in 10,000"),
        *(f"found, {factor} times" for factor in _FACTORS),
        *(f"masked, 1 in {every}" for every in _MASKED_EVERY),
        *("periodic", "lasting"),
    ]
    rows = []
    for (name, window), of_training in figures.items():
        chosen = [of_training[training] for training in trainings]
        shares = [
            *([each.found[factor] for each in chosen] for factor in _FACTORS),
            *([each.masked[every] for each in chosen] for every in _MASKED_EVERY),
            [each.periodic for each in chosen],
        ]
        rows.append(
            [
                *(name, f"{window}"),
                f"{10_000 * sum(each.false for each in chosen) / sum(each.steps for each in chosen):.1f}",
                *(f"{np.mean(share):.0%}" for share in shares),
                f"{np.mean([each.lasting for each in chosen]):.0f}",
            ]
        )
    return header, rows


if __name__ == "__main__":
    sys.exit(main())
