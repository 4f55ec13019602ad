"""Judges the training of a BERT script by the effects of its steps."""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from port_bert_sources import Configuration

#: The state that a resumed training goes on from. So many good steps in a row were taken that the scale soon doubles.
RESUMED_STEP, RESUMED_SCALE, RESUMED_GOOD_STEPS = 20, 2.0**13, 990


class Run(NamedTuple):
    """The state after a run of the train op, as the counting module wrote it.

    Attributes:
        runs: The number of runs until then, this one included.
        applied: The number of those runs that changed Adam's first moments.
        step: The global step after the run.
        scale: The loss scale, or 0 if there is none.
        loss: The loss of the run.
    """

    runs: int
    applied: int
    step: int
    scale: float
    loss: float


@dataclasses.dataclass
class Outcome:
    """The outcome of training a configuration.

    Attributes:
        problem: The reason why the configuration does not train; empty if it trains.
        seconds: The duration of the process, including the start of TensorFlow.
        runs: The state after each run of the train op.
        step: The global step in the last checkpoint, if there is one.
        scale: The loss scale in the last checkpoint, if it has one.
        log: The end of the process' output, if the process failed.
    """

    problem: str
    seconds: float
    runs: list[Run]
    step: int | None = None
    scale: float | None = None
    log: str = ""


def read_counts(path: Path) -> list[Run]:
    """Return the runs that the counting module wrote, one a line.

    Args:
        path: The file; if it does not exist, there were no runs.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    # A process that was ended early may have left an incomplete line.
    whole = [fields for line in lines if len(fields := line.split()) == len(Run._fields)]
    return [Run(int(f[0]), int(f[1]), int(f[2]), float(f[3]), float(f[4])) for f in whole]


def problem(outcome: Outcome, started: int, steps: int, configuration: Configuration) -> str:
    """Return the reason why a training is not correct; an empty string if it is.

    Args:
        outcome: The outcome of the training.
        started: The global step that the training started from.
        steps: The number of steps that the training should apply.
        configuration: The configuration of the training.

    Examples:
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
    """Return the mean of the first tenth of losses, and of the last tenth.

    Args:
        losses: The loss of each run.

    Examples:
        >>> ends([4.0, 3.0, 2.0])
        (4.0, 2.0)
    """
    share = max(1, len(losses) // 10)
    return float(np.mean(losses[:share])), float(np.mean(losses[-share:]))


def _grown(steps: int) -> float:
    # The scale doubles after 1000 good steps in a row.
    return RESUMED_SCALE * 2 if RESUMED_GOOD_STEPS + steps >= 1000 else RESUMED_SCALE
