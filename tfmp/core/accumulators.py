"""Keeps an accumulator for each list of variables: one set of them for each graph, one for eager code."""

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tfmp.core.accumulation import AccumulationSettings, GradientAccumulator
from tfmp.core.overflow import OverflowDetector
from tfmp.core.state import OncePerGraph

_Kept: TypeAlias = list[tuple[tuple[tf.Variable, ...], GradientAccumulator]]


class Accumulators:
    """The accumulators of an optimizer that takes steps for several lists of variables, as that of a GAN may.

    In a graph their variables are a script's own: its initializer and its Saver know them, as `accumulation/sum_0`,
    `accumulation/kept` and so on below the current name scope; those of a second list stand in `accumulation_1`.

    Args:
        settings: How to accumulate.
        detector: What counts as overflow.

    Example:
        >>> import tfmp
        >>> from tfmp.core.accumulation import accumulation_settings
        >>> accumulators = Accumulators(accumulation_settings(4, "window", None), tfmp.NonFiniteDetector())
        >>> w, b = tf.Variable(1.0), tf.Variable(1.0)
        >>> accumulators.of([w, b]) is accumulators.of([w, b]), accumulators.of([w]) is accumulators.of([b])
        (True, False)
    """

    def __init__(self, settings: AccumulationSettings, detector: OverflowDetector) -> None:
        self._settings = settings
        self._detector = detector
        self._in_graph: OncePerGraph[_Kept] = OncePerGraph(list)
        self._in_eager_code: _Kept = []

    def of(self, variables: Sequence[tf.Variable]) -> GradientAccumulator:
        """Return the accumulator for a list of variables, making it on the first call.

        Args:
            variables: The variables, in the order of their gradients.
        """
        with tf.init_scope():
            kept = self._in_eager_code if tf.executing_eagerly() else self._in_graph.get()
            # By identity: in eager code many variables may have one name.
            for others, accumulator in kept:
                if tuple(map(id, others)) == tuple(map(id, variables)):
                    return accumulator
            with tf.name_scope("accumulation"):
                made = GradientAccumulator(
                    variables,
                    self._settings.accumulation_steps,
                    overflow_drops=self._settings.overflow_drops,
                    micro_batches_per_epoch=self._settings.micro_batches_per_epoch,
                    overflow_detector=self._detector,
                )
            kept.append((tuple(variables), made))
            return made
