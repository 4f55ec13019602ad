"""The accumulators of a TF1 optimizer: one for each list of variables, separately in each graph and in eager code."""

from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator, accumulator_of_optimizer
from tfmp.core.accumulation.settings import AccumulationSettings
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.storage.graph_registry import OncePerGraph


class Accumulators(tf.Module):
    """The accumulators of an optimizer that may take steps for several lists of variables, as in a GAN.

    In a graph the accumulators' variables are global variables, which the script's initializer and `Saver` handle with
    all others. Their names are `accumulation/sum_0`, `accumulation/kept` and so on, below the current name scope; those
    for a second list of variables start with `accumulation_1`. In eager code a `tf.train.Checkpoint` that is given this
    object holds the variables.

    The mean of a window stays in float32 for variables of half precision if `keeps_float32` is true.

    Examples:
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
        #: The accumulators of eager code, in the order of their first use. Checkpoints contain the name of this
        #: attribute, so it must not change.
        self.windows: list[GradientAccumulator] = []

    @property
    def is_on(self) -> bool:
        """Whether a window has more than one micro-batch."""
        return self._settings.accumulation_steps > 1

    def of(self, variables: Sequence[tf.Variable]) -> GradientAccumulator:
        """Return the accumulator for a list of variables, in this order; the first call for a list makes it."""
        with tf.init_scope():
            eager = tf.executing_eagerly()
            kept = self._in_eager_code if eager else self._in_graph.get()
            found = kept.find(variables)
            if found is not None:
                return found
            with tf.name_scope("accumulation"):
                made = accumulator_of_optimizer(
                    variables, self._settings, self._detector, keeps_float32=self._keeps_float32
                )
            # A strategy runs its replicas in threads that wait for each other whenever a variable is made. Another
            # replica may have added its accumulator while this one waited.
            found = kept.find(variables)
            if found is not None:
                return found
            kept.add(variables, made)
            if eager:
                self.windows.append(made)
            return made

    def in_graph(self) -> list[tf.Variable]:
        """Return the variables that the accumulators made in the current graph; none in eager code."""
        made = self._in_graph.made()
        return [] if made is None else [each for accumulator in made for each in accumulator.variables]


class _ByVariables:
    """A dictionary from lists of variables to accumulators.

    It is not a `tf.Module`: a checkpoint of the accumulators would then also contain the trained variables.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[tuple[tf.Variable, ...], GradientAccumulator]] = []

    def find(self, variables: Sequence[tf.Variable]) -> GradientAccumulator | None:
        # Variables are compared by identity, because in eager code several may have the same name.
        for others, accumulator in self._pairs:
            if tuple(map(id, others)) == tuple(map(id, variables)):
                return accumulator
        return None

    def __iter__(self) -> Iterator[GradientAccumulator]:
        return (accumulator for _, accumulator in self._pairs)

    def add(self, variables: Sequence[tf.Variable], accumulator: GradientAccumulator) -> None:
        self._pairs.append((tuple(variables), accumulator))
