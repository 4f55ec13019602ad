"""The results of the trainings, and a summary that shows them side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from estimator_examples.digits_gan import quality, training


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A training and its results.

    Attributes:
        precision: The precision, named as on the command line.
        gan: The trained nets.
        records: The record of every iteration.
        generated: Generated images, [n, 64].
        estimate: The critic's estimate of the Wasserstein distance between test digits and generated digits.
        nearest: The mean distance of a generated digit to the nearest test digit.
        frechet: The Fréchet distance between generated digits and test digits.
        lost: The share of the penalty's gradient that float16 makes zero.
        seconds: The duration of the training.
    """

    precision: str
    gan: training.Gan
    records: Sequence[training.Record]
    generated: np.ndarray
    estimate: float
    nearest: float
    frechet: float
    lost: float
    seconds: float

    @property
    def generator_attempts(self) -> int:
        """The number of iterations in which the generator's optimizer was called."""
        return sum(record.with_generator for record in self.records)


def outcome_of(
    precision: str, gan: training.Gan, records: Sequence[training.Record], test: np.ndarray, seconds: float
) -> Outcome:
    """Generate as many digits as there are test digits, and compare the two sets.

    Args:
        precision: The precision, named as on the command line.
        gan: The trained nets.
        records: The record of every iteration.
        test: Digits that were not used for training, [n, 64].
        seconds: The duration of the training.
    """
    generated = np.array(gan.generator(training.noise(np.random.default_rng(0), len(test))))
    estimate = np.mean(gan.critic(test)) - np.mean(gan.critic(generated))
    return Outcome(
        precision,
        gan,
        records,
        generated,
        float(estimate),
        quality.nearest_distance(generated, test),
        quality.frechet_distance(generated, test),
        quality.lost_share(gan, test),
        seconds,
    )


def summary_text(outcomes: Sequence[Outcome], training_images: np.ndarray, test: np.ndarray) -> str:
    """Return the summary: a column for each training, and one that compares training digits with test digits."""
    real = {
        _NEAREST: f"{quality.nearest_distance(training_images, test):.3f}",
        _FRECHET: f"{quality.frechet_distance(training_images, test):.3f}",
    }
    rows = [["", *(outcome.precision for outcome in outcomes), "training digits"]]
    rows += [[name, *(text(outcome) for outcome in outcomes), real.get(name, "")] for name, text in _ROWS.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(["Summary", *(f"  {line}" for line in lines)])


def scale_text(loss_scale: float) -> str:
    """Format a loss scale; a large power of two is written as `2^n`.

    Examples:
        >>> scale_text(65536.0), scale_text(1000.0), scale_text(1.0)
        ('2^16', '1000', '1')
    """
    fraction, exponent = math.frexp(loss_scale)
    return f"2^{exponent - 1}" if fraction == 0.5 and exponent > 10 else f"{loss_scale:g}"


def _steps_text(applied: int, attempts: int) -> str:
    return f"{applied}, {attempts - applied} skipped"


_NEAREST, _FRECHET = "nearest test digit", "Frechet distance"
_ROWS = {
    "loss scale": lambda outcome: scale_text(outcome.records[-1].loss_scale),
    "critic steps": lambda outcome: _steps_text(outcome.records[-1].critic_steps, len(outcome.records)),
    "generator steps": lambda outcome: _steps_text(outcome.records[-1].generator_steps, outcome.generator_attempts),
    "gradient penalty": lambda outcome: f"{outcome.records[-1].penalty:.4f}",
    "penalty gradient lost": lambda outcome: f"{outcome.lost:.2%}",
    "Wasserstein estimate": lambda outcome: f"{outcome.estimate:.3f}",
    _NEAREST: lambda outcome: f"{outcome.nearest:.3f}",
    _FRECHET: lambda outcome: f"{outcome.frechet:.3f}",
    "seconds": lambda outcome: f"{outcome.seconds:.0f}",
}
