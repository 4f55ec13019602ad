"""The ranges of values that monitors have recorded during a training."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from tfmp.ranges import plots
from tfmp.ranges.histogram import RangeHistogram, RangeShares

#: The kinds of values that the loss scale multiplies.
GRADIENTS = ("gradients", "activation_gradients")

#: The shares that a monitor shows.
_SHOWN = ("zero", "lost", "subnormal")


class RangeRecording(NamedTuple):
    """The ranges of values at one step.

    Attributes:
        step: The number of the step among all that were attempted, applied or skipped, from 1. (In TensorBoard,
            recordings stand at the number of applied steps or `global_step`, as all summaries do.)
        loss_scale: The loss scale of that step.
        histograms: By kind, and then by the name of a variable, layer or probe. The kinds are "gradients" (those of the
            weights) and "weights"; where activations were recorded, too, "activations" and "activation_gradients".
            Gradients are unscaled.

    Provisional: a minor version may change it.
    """

    step: int
    loss_scale: float
    histograms: Mapping[str, Mapping[str, RangeHistogram]]

    @property
    def shares(self) -> RangeShares:
        """What float16 keeps of all gradients at this loss scale."""
        found = [each for kind in GRADIENTS for each in self.histograms.get(kind, {}).values()]
        total = sum(found, start=RangeHistogram())
        return total.shares(scale=self.loss_scale)

    def tagged(self) -> Iterator[tuple[str, RangeHistogram]]:
        """Yield the histograms with their names in TensorBoard."""
        for kind, histograms in self.histograms.items():
            for name, histogram in histograms.items():
                yield f"{kind}/{name}", histogram

    def scalars(self) -> dict[str, float]:
        """Return the shares that a monitor shows as numbers, by their names in logs and in TensorBoard."""
        shares = self.shares
        return {f"gradients_{kind}": getattr(shares, kind) for kind in _SHOWN}


def histograms_by_name(names: Iterable[str], counts: Iterable[npt.ArrayLike]) -> dict[str, RangeHistogram]:
    """Return histograms by the names of variables or probes, without the ":0" of TensorFlow's names.

    Each row of counts is for one name. What has the same name, such as the copies of a variable on replicas, is counted
    together.
    """
    found: dict[str, RangeHistogram] = {}
    for name, row in zip(names, counts, strict=True):
        plain = name.partition(":")[0]
        found[plain] = found.get(plain, RangeHistogram()) + RangeHistogram(row)
    return found


class RangeHistory:
    """The ranges of values that a callback or a hook has recorded, the oldest first.

    Attributes:
        last: The last recording, with its histograms; None before the first one. Of all others the shares are kept.

    Examples:
        >>> import tensorflow as tf
        >>> history = RangeHistory()
        >>> kernel = RangeHistogram.of(tf.constant([2.0**-28, 1.0]))
        >>> history._add(RangeRecording(step=100, loss_scale=2.0, histograms={"gradients": {"kernel": kernel}}))
        >>> history.last.scalars()
        {'gradients_zero': 0.0, 'gradients_lost': 0.5, 'gradients_subnormal': 0.0}

    Provisional: a minor version may change it.
    """

    def __init__(self) -> None:
        self.last: RangeRecording | None = None
        self._steps: list[int] = []
        self._loss_scales: list[float] = []
        self._shares: list[RangeShares] = []

    def _add(self, recording: RangeRecording) -> None:
        """Add a recording."""
        self.last = recording
        self._steps.append(recording.step)
        self._loss_scales.append(recording.loss_scale)
        self._shares.append(recording.shares)

    def _scalars(self) -> dict[str, float]:
        """Return what the logs show: the shares of the last recording, NaN before the first one."""
        return dict.fromkeys(map("gradients_{}".format, _SHOWN), math.nan) if self.last is None else self.last.scalars()

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the steps, the loss scales and the shares of gradients as lists that JSON can hold."""
        shares = {f"gradients_{kind}": [getattr(each, kind) for each in self._shares] for kind in RangeShares._fields}
        return {"step": list(self._steps), "loss_scale": list(self._loss_scales), **shares}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the loss scale and the shares of gradients over the steps, and heat maps of the last recording below.

        Args:
            path: The file, whose suffix tells its format: .png, .svg or .pdf.

        Raises:
            ImportError: Matplotlib is not installed.
            OSError: The file cannot be written.
            ValueError: Nothing was recorded yet.
        """
        last = self.last
        if last is None:
            raise ValueError("there is nothing to draw yet: no step was looked at.")
        maps = {}
        for kind, histograms in last.histograms.items():
            in_gradients = kind in GRADIENTS
            title = kind.replace("_", " ") + (f", loss scale {last.loss_scale:g}" if in_gradients else "")
            maps[title] = (histograms, last.loss_scale if in_gradients else 1.0)
        plots.heat_maps(path, maps, plots.Course(self._steps, self._loss_scales, self._shares))
