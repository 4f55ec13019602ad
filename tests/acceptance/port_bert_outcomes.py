"""What came of training a BERT script, judged by what its steps did."""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from port_bert_sources import Configuration

#: What a run that resumes goes on from: so many good steps that the scale soon doubles.
RESUMED_STEP, RESUMED_SCALE, RESUMED_GOOD_STEPS = 20, 2.0**13, 990


class Run(NamedTuple):
    """What a run of a train op left, as the counting module wrote it.

    Attributes:
        runs: How many there were with it.
        applied: How many of them moved Adam's first moments.
        step: The global step after it.
        scale: The loss scale, or 0.
        loss: The loss.
    """

    runs: int
    applied: int
    step: int
    scale: float
    loss: float


@dataclasses.dataclass
class Outcome:
    """What came of a configuration.

    Attributes:
        problem: Why it does not train; empty if it does.
        seconds: How long its process took, TensorFlow's start included.
        runs: What each run of the train op left.
        step: The global step in its last checkpoint, if it has one.
        scale: The loss scale there, if it has one.
        log: The end of what it printed, if there is a problem.
    """

    problem: str
    seconds: float
    runs: list[Run]
    step: int | None = None
    scale: float | None = None
    log: str = ""


def read_counts(path: Path) -> list[Run]:
    """Return what the counting module wrote, one run a line.

    Args:
        path: The file; if there is none, nothing ran.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    # A process that was ended may have left a line half written.
    whole = [fields for line in lines if len(fields := line.split()) == len(Run._fields)]
    return [Run(int(f[0]), int(f[1]), int(f[2]), float(f[3]), float(f[4])) for f in whole]


def problem(outcome: Outcome, started: int, steps: int, configuration: Configuration) -> str:
    """Return why a training that ended is none, or nothing.

    Args:
        outcome: What came of it.
        started: The global step it went on from.
        steps: How many steps it was to apply.
        configuration: How it was trained.

    Example:
        >>> runs = [Run(1, 1, 1, 0.0, 4.0), Run(2, 2, 2, 0.0, math.nan)]
        >>> problem(Outcome("", 9.0, runs, step=2), 0, 2, Configuration("fp32"))
        'the loss is nan in run 2 of 2'
    """
    losses = [run.loss for run in outcome.runs]
    if not losses:
        return "it ran no step"
    wild = next((index for index, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    applied = outcome.runs[-1].applied
    first, last = ends(losses)
    checks = {
        f"the loss is {losses[(wild or 1) - 1]} in run {wild} of {len(losses)}": wild is None,
        f"the loss does not fall: {first:.3f}, then {last:.3f}": last < first,
        f"the step ends at {outcome.step}, where {started + applied} were applied": outcome.step == started + applied,
        f"{applied} steps were applied, not {steps}": applied == steps,
    }
    if configuration.resumes and configuration.wrapped:
        begun = outcome.runs[0].scale
        checks[f"it goes on with the scale {begun:g}, not {RESUMED_SCALE:g}"] = begun == RESUMED_SCALE
        checks[f"the scale ends at {outcome.scale}, not {_grown(steps)}"] = outcome.scale == _grown(steps)
    return next((text for text, passed in checks.items() if not passed), "")


def ends(losses: list[float]) -> tuple[float, float]:
    """Return the mean of the first and of the last tenth of losses.

    Args:
        losses: One of each run.

    Example:
        >>> ends([4.0, 3.0, 2.0])
        (4.0, 2.0)
    """
    share = max(1, len(losses) // 10)
    return float(np.mean(losses[:share])), float(np.mean(losses[-share:]))


def _grown(steps: int) -> float:
    # After 1000 good steps in a row it doubles.
    return RESUMED_SCALE * 2 if RESUMED_GOOD_STEPS + steps >= 1000 else RESUMED_SCALE
