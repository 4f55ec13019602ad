"""The results of a run: a summary, as text and as JSON, and a picture."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from estimator_examples.bert.history import Step

WINDOW = 20


@dataclasses.dataclass(frozen=True)
class Summary:
    """The final figures of a run, together with the earlier runs that it continued.

    Attributes:
        window: The number of applied steps over which the losses at the start and at the end are averaged.
        evaluation: The metrics on held-out text, by name.
    """

    precision: str
    loss_scaling: str
    steps_attempted: int
    steps_applied: int
    steps_skipped: int
    final_loss_scale: float
    window: int
    mlm_loss_start: float
    mlm_loss_end: float
    nsp_loss_start: float
    nsp_loss_end: float
    evaluation: dict[str, float]
    checkpoint: str
    picture: str


def summarize(
    steps: Sequence[Step],
    *,
    precision: str,
    loss_scaling: str,
    evaluation: Mapping[str, float],
    checkpoint: str,
    picture: str,
) -> Summary:
    """Count the steps, and average the losses at the start and at the end.

    Args:
        steps: All attempted steps; at least one of them must have been applied.
        precision: The level of precision, such as "O2".
        loss_scaling: How the loss was scaled, in words.
        evaluation: The metrics on held-out text, by name.
        checkpoint: The path of the last checkpoint.
        picture: The path of the picture.

    Raises:
        ValueError: No step was applied.
    """
    applied = [step for step in steps if step.applied]
    if not applied:
        raise ValueError(f"none of the {len(steps)} steps was applied: there is no loss to report.")
    window = max(1, min(WINDOW, len(applied) // 2))
    first, last = applied[:window], applied[-window:]
    return Summary(
        precision=precision,
        loss_scaling=loss_scaling,
        steps_attempted=len(steps),
        steps_applied=len(applied),
        steps_skipped=len(steps) - len(applied),
        final_loss_scale=steps[-1].loss_scale,
        window=window,
        mlm_loss_start=_mean([step.mlm_loss for step in first]),
        mlm_loss_end=_mean([step.mlm_loss for step in last]),
        nsp_loss_start=_mean([step.nsp_loss for step in first]),
        nsp_loss_end=_mean([step.nsp_loss for step in last]),
        evaluation=dict(evaluation),
        checkpoint=checkpoint,
        picture=picture,
    )


def summary_text(summary: Summary) -> str:
    """Return the summary as lines of text."""
    rows = [
        ("precision", f"{summary.precision}, {summary.loss_scaling}"),
        ("steps attempted", str(summary.steps_attempted)),
        ("steps applied", str(summary.steps_applied)),
        ("steps skipped", str(summary.steps_skipped)),
        ("final loss scale", scale_text(summary.final_loss_scale)),
        ("MLM loss", f"{summary.mlm_loss_start:.3f} -> {summary.mlm_loss_end:.3f}"),
        ("NSP loss", f"{summary.nsp_loss_start:.3f} -> {summary.nsp_loss_end:.3f}"),
        *((f"held-out {name}", f"{value:.3f}") for name, value in summary.evaluation.items()),
        ("checkpoint", summary.checkpoint),
        ("picture", summary.picture),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    note = f"Losses are means over the first and the last {summary.window} applied steps."
    return "\n".join(["Summary", *lines, note])


def write_summary(summary: Summary, path: pathlib.Path) -> None:
    """Write the summary to a JSON file."""
    path.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n", encoding="utf-8")


def scale_text(loss_scale: float) -> str:
    """Format a loss scale in the same way as `tfmp.LossScaleLoggingHook`.

    Examples:
        >>> scale_text(2.0**32), scale_text(1000.0), scale_text(2.0**40)
        ('4294967296', '1000', '1.099511628e+12')
    """
    return f"{loss_scale:.10g}"


def draw(steps: Sequence[Step], trained: str) -> Figure:
    """Draw the losses and the loss scale over the attempted steps, and mark the skipped steps.

    Args:
        steps: All attempted steps.
        trained: The description of the model and its precision, for the title.

    Returns:
        The figure, which is not saved yet.
    """
    # The figure is not made by pyplot, which would change global state and look for a display.
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    applied = sum(step.applied for step in steps)
    figure.suptitle(f"{trained}\n{applied} steps applied, {len(steps) - applied} skipped")
    losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for axes in (losses, scales):
        _mark_skipped(axes, [step.attempt for step in steps if not step.applied])
    _draw_losses(losses, [step for step in steps if step.applied])
    scales.step([step.attempt for step in steps], [step.loss_scale for step in steps], where="post")
    scales.set_yscale("log", base=2)
    scales.yaxis.set_major_formatter(lambda scale, _: scale_text(scale))
    scales.set_ylabel("loss scale")
    scales.set_xlabel("attempted step")
    return figure


def smooth(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """Return the exponential moving average, corrected for its start from zero.

    Examples:
        >>> smooth([3.0, 3.0])
        [3.0, 3.0]
    """
    averages: list[float] = []
    total = share = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        share = weight * share + (1 - weight)
        averages.append(total / share)
    return averages


def _draw_losses(axes: Axes, applied: Sequence[Step]) -> None:
    attempts = [step.attempt for step in applied]
    mlm = [step.mlm_loss for step in applied]
    nsp = [step.nsp_loss for step in applied]
    axes.plot(attempts, mlm, color="tab:blue", alpha=0.3, linewidth=0.8)
    axes.plot(attempts, smooth(mlm), color="tab:blue", label="masked words (MLM)")
    axes.plot(attempts, smooth(nsp), color="tab:green", label="next sentence (NSP)")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.legend()


def _mark_skipped(axes: Axes, attempts: Sequence[int]) -> None:
    axes.vlines(
        attempts,
        0,
        1,
        transform=axes.get_xaxis_transform(),
        color="tab:red",
        alpha=0.3,
        linewidth=1,
        label=f"skipped steps ({len(attempts)})",
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
