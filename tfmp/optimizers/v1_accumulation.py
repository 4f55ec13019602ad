"""Keeps an accumulator for each list of variables: one set of them for each graph, one for eager code."""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.accumulation.settings import AccumulationSettings
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.storage.graph_registry import OncePerGraph


class Accumulators(tf.Module):
    """The accumulators of an optimizer that takes steps for several lists of variables, as that of a GAN may.

    In a graph their variables are a script's own: its initializer and its Saver know them, as `accumulation/sum_0`,
    `accumulation/kept` and so on below the current name scope; those of a second list stand in `accumulation_1`. Those
    of eager code are in a `tf.train.Checkpoint` that is given this object.

    Args:
        settings: How to accumulate.
        detector: What counts as overflow.
        keeps_float32: As in `GradientAccumulator`.

    Example:
        >>> import tfmp
        >>> from tfmp.core.accumulation.settings import accumulation_settings
        >>> accumulators = Accumulators(accumulation_settings(4, "window", None), tfmp.NonFiniteDetector())
        >>> w, b = tf.Variable(1.0), tf.Variable(1.0)
        >>> accumulators.of([w, b]) is accumulators.of([w, b]), accumulators.of([w]) is accumulators.of([b])
        (True, False)
    """

    def __init__(
        self, settings: AccumulationSettings, detector: OverflowDetector, *, keeps_float32: bool = False
    ) -> None:
        super().__init__()
        self._settings = settings
        self._detector = detector
        self._keeps_float32 = keeps_float32
        self._in_graph = OncePerGraph(_ByVariables)
        self._in_eager_code = _ByVariables()
        #: Those of eager code, in the order of their first use. The name stands in the keys of `tf.train.Checkpoint`.
        self.windows: list[GradientAccumulator] = []

    @property
    def is_on(self) -> bool:
        """Whether a window has more than one micro-batch."""
        return self._settings.accumulation_steps > 1

    def of(self, variables: Sequence[tf.Variable]) -> GradientAccumulator:
        """Return the accumulator for a list of variables, making it on the first call.

        Args:
            variables: The variables, in the order of their gradients.
        """
        with tf.init_scope():
            eager = tf.executing_eagerly()
            kept = self._in_eager_code if eager else self._in_graph.get()
            found = kept.find(variables)
            if found is not None:
                return found
            with tf.name_scope("accumulation"):
                made = GradientAccumulator(
                    variables,
                    **self._settings._asdict(),
                    overflow_detector=self._detector,
                    keeps_float32=self._keeps_float32,
                )
            # Replicas build in lockstep: another may have come here while this one waited for its variables.
            found = kept.find(variables)
            if found is not None:
                return found
            kept.add(variables, made)
            if eager:
                self.windows.append(made)
            return made


class _ByVariables:
    """Finds accumulators. No `tf.Module`: a checkpoint that holds windows must not hold the variables trained too."""

    def __init__(self) -> None:
        self._pairs: list[tuple[tuple[tf.Variable, ...], GradientAccumulator]] = []

    def find(self, variables: Sequence[tf.Variable]) -> GradientAccumulator | None:
        # By identity: in eager code many variables may have one name.
        for others, accumulator in self._pairs:
            if tuple(map(id, others)) == tuple(map(id, variables)):
                return accumulator
        return None

    def add(self, variables: Sequence[tf.Variable], accumulator: GradientAccumulator) -> None:
        self._pairs.append((tuple(variables), accumulator))
