"""What trainings came to: a summary for a person, side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from estimator_examples.digits_gan import quality, training


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A training, and what it ended with.

    Attributes:
        precision: As on the command line.
        gan: The nets.
        records: Of every iteration.
        generated: Images, [n, 64].
        estimate: Of the Wasserstein distance of test digits and generated ones.
        nearest: The mean distance of a generated digit to the nearest test digit.
        frechet: The Fréchet distance of generated digits and test digits.
        lost: The share of the penalty's gradient that float16 makes zero.
        seconds: How long it took.
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
        """How often the generator's optimizer was called."""
        return sum(record.with_generator for record in self.records)


def outcome_of(
    precision: str, gan: training.Gan, records: Sequence[training.Record], test: np.ndarray, seconds: float
) -> Outcome:
    """Let the generator draw as many digits as there are to test, and compare them.

    Args:
        precision: As on the command line.
        gan: The nets, trained.
        records: Of every iteration.
        test: Digits that were not trained on, [n, 64].
        seconds: How long the training took.
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
    """Return the summary: a column for each training, and one for real digits in the place of generated ones."""
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
    """Write a loss scale as a power of two if it is a large one.

    Example:
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
