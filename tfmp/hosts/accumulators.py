"""The accumulators of an optimizer: one for each list of variables, separately in each graph and in eager code."""

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.accumulation import AccumulationSettings, GradientAccumulator, accumulator_of_optimizer
from tfmp.core.adapter import is_overwritten, takes_float32_gradients
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.storage.graph_variables import OncePerGraph
from tfmp.types import AddBuffer

_Made: TypeAlias = list[tuple[Sequence[Any], GradientAccumulator]]


class Accumulators:
    """The accumulators of an optimizer that may take steps for several lists of variables, as in a GAN.

    In a graph their variables are global variables: `accumulation/sum_0`, `accumulation/kept` and so on, below the
    current name scope; those for a second list of variables start with `accumulation_1`. An optimizer of Keras calls
    `build` and has one accumulator, whose variables are its own. No checkpoint tracks this object: Keras 3 would save
    these variables a second time.
    """

    def __init__(self, settings: AccumulationSettings, detector: OverflowDetector, optimizer: object) -> None:
        self.settings = settings
        self._detector = detector
        self._optimizer = optimizer
        self._in_graph: OncePerGraph[_Made] = OncePerGraph(list)
        self._in_eager_code: _Made = []
        self._is_built = False
        #: Holds those of eager code in the order of their first use, unless an optimizer of Keras does. Checkpoints
        #: contain the name `windows`.
        self.saved = tf.Module()
        self.saved.windows = []

    @property
    def is_on(self) -> bool:
        """Whether a window has more than one micro-batch."""
        return self.settings.accumulation_steps > 1

    def build(self, variables: Sequence[Any], add_buffer: AddBuffer) -> None:
        """Make the accumulator of an optimizer of Keras, if gradients are accumulated and it is not made yet."""
        if not self.is_on or self._is_built:
            return
        overwritten = [variable.name for variable in variables if is_overwritten(variable)]
        if overwritten:
            raise ValueError(
                f"accumulation_steps={self.settings.accumulation_steps}, and the gradients of these variables are "
                f"their next values (float8 scales), which have no mean: {', '.join(overwritten)}. Leave "
                "accumulation_steps at 1, or train without float8."
            )
        self._in_eager_code = [(list(variables), self._make(variables, add_buffer))]
        self._is_built = True

    def of(self, variables: Sequence[Any]) -> GradientAccumulator | None:
        """Return the accumulator for these variables, in their order; None if gradients are not accumulated."""
        if not self.is_on:
            return None
        with tf.init_scope():
            eager = tf.executing_eagerly()
            kept = self._in_eager_code if eager or self._is_built else self._in_graph.get()
            found = _find(kept, variables)
            if found is None and self._is_built:
                raise ValueError(
                    f"the gradients are of {len(variables)} variables, which differ from the {len(kept[0][0])} that "
                    "the optimizer was built with, or are in another order: with accumulation_steps pass a gradient "
                    "for each of those in every micro-batch, None where the loss does not depend on it."
                )
            if found is None:
                with tf.name_scope("accumulation"):
                    made = self._make(variables)
                # A strategy runs its replicas in threads that wait for each other whenever a variable is made. Another
                # replica may have added its accumulator while this one waited.
                found = _find(kept, variables)
            if found is None:
                found = made
                kept.append((tuple(variables), made))
                self.saved.windows.extend([made] if eager else [])
            return found

    def _make(self, variables: Sequence[Any], add_buffer: AddBuffer | None = None) -> GradientAccumulator:
        keeps_float32 = takes_float32_gradients(self._optimizer)
        return accumulator_of_optimizer(
            variables, self.settings, self._detector, add_buffer, keeps_float32=keeps_float32
        )


def _find(made: _Made, variables: Sequence[Any]) -> GradientAccumulator | None:
    # Variables are compared by identity, because in eager code several may have the same name.
    for others, accumulator in made:
        if len(others) == len(variables) and all(map(operator.is_, others, variables)):
            return accumulator
    return None
