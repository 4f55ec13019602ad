"""The norms of the gradients during a training, as a callback or a hook saw them."""

import math
import os
from typing import Any, NamedTuple

from tfmp.environment import require


class _Seen(NamedTuple):
    #: The number of the attempted step, from 1.
    step: int
    norm: float
    #: The steps that were skipped as spikes until then.
    skipped_spikes: int


class NormHistory:
    """The norms of the gradients that a callback or a hook has seen, the oldest first.

    Examples:
        >>> history = NormHistory()
        >>> history._add(step=100, norm=2.5, skipped_spikes=0)
        >>> history._add(step=200, norm=80.0, skipped_spikes=1)
        >>> history.to_dict()
        {'step': [100, 200], 'gradient_norm': [2.5, 80.0], 'skipped_spikes': [0, 1]}

    Provisional: a minor version may change it.
    """

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def _add(self, *, step: int, norm: float, skipped_spikes: int) -> None:
        """Add what was seen after a step, unless it was seen already: a call that takes no step changes nothing."""
        if not self._seen or self._seen[-1].step != step:
            self._seen.append(_Seen(step, norm, skipped_spikes))

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
        # A spike that a monitor did not look at directly afterwards cannot be marked: the norm shown is a later one.
        before = [0, *(seen.skipped_spikes for seen in self._seen)]
        spikes = [seen for seen, known in zip(self._seen, before, strict=False) if seen.skipped_spikes == known + 1]
        overflows = [seen.step for seen in self._seen if not math.isfinite(seen.norm)]
        axis.plot([seen.step for seen in finite], [seen.norm for seen in finite], linewidth=0.8, color="tab:blue")
        marked = [seen for seen in spikes if math.isfinite(seen.norm)]
        if marked:
            steps, norms = [seen.step for seen in marked], [seen.norm for seen in marked]
            axis.plot(steps, norms, "x", color="tab:red", label="skipped as a spike")
        if overflows:
            top = [1.0] * len(overflows)
            axis.plot(overflows, top, "v", color="tab:orange", transform=axis.get_xaxis_transform(), label="overflow")
        if marked or overflows:
            axis.legend()
        axis.set_yscale("log")
        axis.set_xlabel("attempted step")
        axis.set_ylabel("gradient norm")
        figure.savefig(path, dpi=120)
