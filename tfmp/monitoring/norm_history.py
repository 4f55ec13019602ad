"""The norms of the gradients during a training, as a callback or a hook saw them."""

import math
import os
from typing import Any, NamedTuple

from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.environment import require


class _Seen(NamedTuple):
    #: The number of the attempted step, from 1.
    step: int
    norm: float
    #: The steps that were skipped as spikes until then.
    skipped_spikes: int
    #: Whether this step was.
    is_spike: bool


class NormHistory:
    """The norms of the gradients that a callback or a hook has seen, the oldest first.

    Examples:
        >>> history = NormHistory()
        >>> history._add(2.5, LossScaleStatus(1024.0, True, True, 1, 1, 0, 0), skipped_spikes=0)
        >>> history._add(80.0, LossScaleStatus(1024.0, False, True, 2, 1, 1, 1), skipped_spikes=1)
        >>> history.to_dict()
        {'step': [1, 2], 'gradient_norm': [2.5, 80.0], 'skipped_spikes': [0, 1]}

    Provisional: a minor version may change it.
    """

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def _add(self, norm: float, status: LossScaleStatus, skipped_spikes: int) -> None:
        """Add what was seen after a step, unless there was none, or it was seen already."""
        step = int(status.attempted_steps)
        if step != (self._seen[-1].step if self._seen else 0):
            is_spike = bool(status.last_step_finite) and not bool(status.last_step_applied)
            self._seen.append(_Seen(step, norm, skipped_spikes, is_spike))

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the steps, the norms, and how many steps were skipped as spikes until then, as lists."""
        return {
            "step": [seen.step for seen in self._seen],
            "gradient_norm": [seen.norm for seen in self._seen],
            "skipped_spikes": [seen.skipped_spikes for seen in self._seen],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the norms over the steps, with a logarithmic axis; spikes and overflows are marked.

        Args:
            path: The file, whose suffix tells its format: .png, .svg or .pdf.

        Raises:
            ImportError: Matplotlib is not installed.
            OSError: The file cannot be written.
            ValueError: No norm was seen yet.
        """
        if not self._seen:
            raise ValueError("there is nothing to draw yet: no norm was seen.")
        figure = require("matplotlib.figure", extra="plot").Figure(figsize=(9, 3.2), layout="constrained")
        axis = figure.subplots()
        finite = [seen for seen in self._seen if math.isfinite(seen.norm)]
        axis.plot([seen.step for seen in finite], [seen.norm for seen in finite], linewidth=0.8, color="tab:blue")
        spikes = [(seen.step, seen.norm) for seen in finite if seen.is_spike]
        if spikes:
            axis.plot(*zip(*spikes, strict=True), "x", color="tab:red", label="skipped as a spike")
        overflows = [(seen.step, 1.0) for seen in self._seen if not math.isfinite(seen.norm)]
        if overflows:
            at_top = {"transform": axis.get_xaxis_transform(), "label": "overflow"}
            axis.plot(*zip(*overflows, strict=True), "v", color="tab:orange", **at_top)
        if spikes or overflows:
            axis.legend()
        # Matplotlib warns if there is nothing to show on a logarithmic axis.
        if any(seen.norm > 0 for seen in finite):
            axis.set_yscale("log")
        axis.set_xlabel("attempted step")
        axis.set_ylabel("gradient norm")
        figure.savefig(path, dpi=120)
