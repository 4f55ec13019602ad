"""Runs the batches in float16, finds what must stay in float32 for that, and compares the gradients."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfmp.ranges.check.comparison import GradientComparison
from tfmp.ranges.check.model_runs import IN_FLOAT32, ModelRun, Precision, Subject

#: What a model raises whose own code is not for float16.
_FAILURES = (TypeError, ValueError, tf.errors.OpError)


class Float16Runs:
    """What runs in float16 show, in which some layers compute in float32; `kept` has why, by their names."""

    def __init__(self, subject: Subject, kept: Mapping[str, str], loss_scale: float) -> None:
        self._subject = subject
        self.kept = dict(kept)
        #: Halved as long as gradients overflow.
        self.loss_scale = loss_scale
        self.comparison = GradientComparison()
        self.losses: list[float] = []
        #: Whether no layer returned infinities or NaN in the runs that were compared.
        self.outputs_are_finite = True
        #: Why the model could not be run in float16, and whether that is so only with layers kept in float32.
        self.error: str | None = None
        self.keeping_fails = False

    def compare(self, batches: Callable[[], Iterable[Any]]) -> None:
        """Run all batches in float32 and in float16, and compare their gradients.

        Both begin anew when a layer is found to overflow or the loss scale to be too high. If the model cannot be run
        in float16, there is nothing to compare.
        """
        while True:
            self.comparison, self.losses, self.outputs_are_finite = GradientComparison(), [], True
            for batch in batches():
                in_float32, in_float16 = self._subject.run(batch, IN_FLOAT32), self._run_in_float16(batch)
                if in_float16 is None:
                    self.comparison, self.losses = GradientComparison(), []
                    return
                if self._has_changed(in_float16):
                    break
                self.comparison.add(in_float32.gradients, in_float16.gradients)
                self.losses.append(in_float16.loss)
            else:
                return

    def _has_changed(self, run: ModelRun) -> bool:
        """Keep one more layer in float32, or halve the scale, if a run in float16 shows that it must be so."""
        name = self._first_overflowing(run)
        if name is not None:
            self.kept[name] = "in float16 it returns infinities or NaN for finite inputs"
            return True
        self._explain_overflow_between_layers(run)
        # Where an activation is not finite, a lower scale does not help.
        self.outputs_are_finite &= all(measured.finite for measured in run.outputs.values())
        are_finite = self.outputs_are_finite and math.isfinite(run.loss)
        if are_finite and self.loss_scale > 1 and not all(each.finite for each in run.weight_gradients.values()):
            self.loss_scale /= 2
            return True
        return False

    def _run_in_float16(self, batch: Any) -> ModelRun | None:  # noqa: ANN401 - whatever the user's code takes
        """Run a batch in float16; None if the model cannot be run so.

        The code of a layer may fail in float16, or combine what a layer in it returns in float32 with float16, and
        fail. Then it is kept in float32 as a whole, and so on, outwards.
        """
        failed: dict[str, str] = {}
        first_error: str | None = None
        while True:
            try:
                run = self._subject.run(batch, self._in_float16(self.kept.keys() | failed.keys()))
            except _FAILURES as error:
                if not self._subject.keeps_float32:
                    # The user wrote what computes in float16.
                    raise
                first_error = first_error or f"{type(error).__name__}: {error}"
                found = self._subject.failed_in(self.kept.keys() | failed.keys())
                if found is None:
                    break
                layer, reason = found
                failed[layer] = reason
            else:
                self.kept.update({name: why for name, why in failed.items() if name not in self.kept})
                return run
        self.error = first_error
        self.keeping_fails = bool(self.kept) and self._tried(batch, ()) is not None
        return None

    def _in_float16(self, keep_float32: Iterable[str]) -> Precision:
        return Precision("float16", self.loss_scale, frozenset(keep_float32))

    def _tried(self, batch: Any, keep_float32: Iterable[str]) -> ModelRun | None:  # noqa: ANN401 - what the code takes
        try:
            return self._subject.run(batch, self._in_float16(keep_float32))
        except _FAILURES:
            return None

    def _first_overflowing(self, run: ModelRun) -> str | None:
        """Return the first layer that may still be kept in float32 and returns infinities or NaN for finite inputs."""
        if not self._subject.keeps_float32:
            return None
        # A layer within another one returns first: it comes first among the outputs.
        for name, measured in run.outputs.items():
            took_finite = name not in run.inputs or run.inputs[name].finite
            if not measured.finite and took_finite and name not in self.kept:
                return name
        return None

    def _explain_overflow_between_layers(self, run: ModelRun) -> None:
        """Say where an overflow comes from that happens after one layer has returned and before the next is called."""
        if not self._subject.keeps_float32:
            return
        name = next((name for name, measured in run.outputs.items() if not measured.finite), None)
        # No layer has returned anything but finite values before.
        if name in run.inputs and not run.inputs[name].finite:
            self.kept[name] = (
                "what it takes is infinite or NaN in float16, though no layer returned that: compute in float32, too, "
                "what the model computes between the layers before it and this one"
            )
