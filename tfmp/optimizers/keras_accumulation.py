"""Accumulation of gradients for an optimizer of Keras, whichever Keras."""

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.accumulation.settings import AccumulationSettings
from tfmp.core.adapters import is_overwritten
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.types import AddBuffer


class KerasAccumulation:
    """The window of a Keras optimizer, which begins to be one when the optimizer is built.

    No `tf.Module`, nor anything else that a checkpoint looks into: the buffers are among the optimizer's variables
    already, and Keras 3 would save them a second time.

    Args:
        settings: How gradients are accumulated.
        detector: What counts as overflow.

    Example:
        >>> from tfmp.core.accumulation.settings import accumulation_settings
        >>> from tfmp.core.overflow.detectors import NonFiniteDetector
        >>> accumulation = KerasAccumulation(accumulation_settings(1, "window", None), NonFiniteDetector())
        >>> accumulation.is_on, accumulation.get_config()["overflow_drops"]
        (False, 'window')
    """

    def __init__(self, settings: AccumulationSettings, detector: OverflowDetector) -> None:
        self._settings = settings
        self._detector = detector
        self._variables: list[Any] = []
        self._accumulator: GradientAccumulator | None = None

    @property
    def is_on(self) -> bool:
        """Whether a window has more than one micro-batch."""
        return self._settings.accumulation_steps > 1

    def get_config(self) -> dict[str, Any]:
        """Return the settings, as the optimizer's constructor takes them."""
        return self._settings._asdict()

    def build(self, variables: Sequence[Any], add_buffer: AddBuffer) -> None:
        """Make the buffers, once, if there is anything to accumulate.

        Args:
            variables: The variables to train, of any Keras.
            add_buffer: Makes a variable of the optimizer.

        Raises:
            ValueError: A variable is overwritten by its "gradient".
        """
        if not self.is_on or self._accumulator is not None:
            return
        overwritten = [variable.name for variable in variables if is_overwritten(variable)]
        if overwritten:
            raise ValueError(
                f"accumulation_steps={self._settings.accumulation_steps}, and the gradients of these variables are "
                f"their next values (float8 scales), which have no mean: {', '.join(overwritten)}. Leave "
                "accumulation_steps at 1, or train without float8."
            )
        self._variables = list(variables)
        self._accumulator = GradientAccumulator(
            variables, **self.get_config(), overflow_detector=self._detector, add_buffer=add_buffer
        )

    def accumulator_of(self, variables: Sequence[Any]) -> GradientAccumulator | None:
        """Return what takes the gradients of variables; None if they are to be applied at once.

        Args:
            variables: Those of the gradients.

        Raises:
            ValueError: They are not those that the optimizer was built with.
        """
        same = len(variables) == len(self._variables) and all(map(operator.is_, variables, self._variables))
        if self._accumulator is not None and not same:
            raise ValueError(
                f"the gradients are of {len(variables)} variables that are not the {len(self._variables)} that the "
                "optimizer was built with, in their order: with accumulation_steps pass a gradient for each of those "
                "in every micro-batch, None where the loss does not depend on it."
            )
        return self._accumulator


def variables_of_each_replica() -> AbstractContextManager[None]:
    """Return a scope in which every replica gets a variable of its own; what Keras saves is their sum."""

    def make(next_creator: Any, **settings: Any) -> tf.Variable:  # noqa: ANN401 - TensorFlow ships no types
        settings["synchronization"] = tf.VariableSynchronization.ON_READ
        settings["aggregation"] = tf.VariableAggregation.SUM
        return next_creator(**settings)

    return tf.variable_creator_scope(make)
