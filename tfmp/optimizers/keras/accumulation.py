"""Accumulation of gradients in the front-ends for all versions of Keras."""

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator, accumulator_of_optimizer
from tfmp.core.accumulation.settings import AccumulationSettings
from tfmp.core.adapters import is_overwritten
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.types import AddBuffer


class KerasAccumulation:
    """Holds the accumulator of a Keras optimizer, which can only be made when the optimizer is built.

    This class is not a `tf.Module`, nor anything else that a checkpoint tracks: the accumulator's buffers are variables
    of the optimizer already, and Keras 3 would save them a second time.

    Examples:
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
        """Return the settings as keyword arguments of the optimizer's constructor."""
        return self._settings._asdict()

    def build(self, variables: Sequence[Any], add_buffer: AddBuffer, *, keeps_float32: bool = False) -> None:
        """Make the accumulator with its buffers, if windows have more than one micro-batch and it is not made yet.

        `add_buffer` makes a variable of the optimizer. With `keeps_float32` the mean for a variable in half precision
        stays in float32.
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
        self._accumulator = accumulator_of_optimizer(
            variables, self._settings, self._detector, add_buffer, keeps_float32=keeps_float32
        )

    def accumulator_of(self, variables: Sequence[Any]) -> GradientAccumulator | None:
        """Return the accumulator for gradients of these variables, in their order; None if none are accumulated."""
        same = len(variables) == len(self._variables) and all(map(operator.is_, variables, self._variables))
        if self._accumulator is not None and not same:
            raise ValueError(
                f"the gradients are of {len(variables)} variables, which differ from the {len(self._variables)} that "
                "the optimizer was built with, or are in another order: with accumulation_steps pass a gradient for "
                "each of those in every micro-batch, None where the loss does not depend on it."
            )
        return self._accumulator


def variables_of_each_replica() -> AbstractContextManager[None]:
    """Return a scope in which each replica gets its own copy of every variable; a checkpoint holds the copies' sum."""

    def make(next_creator: Any, **settings: Any) -> tf.Variable:  # noqa: ANN401 - TensorFlow ships no types
        settings["synchronization"] = tf.VariableSynchronization.ON_READ
        settings["aggregation"] = tf.VariableAggregation.SUM
        return next_creator(**settings)

    return tf.variable_creator_scope(make)
