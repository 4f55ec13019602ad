"""The part of one optimizer in a step, and the combined check of several optimizers that step together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.overflow.detectors import KINDS
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.grad_scaler.scaled_gradients import ScaledGradientsAdapter, ScaledGradientsOptimizer
from tfmp.hosts.keras.adapters import Keras3Adapter, KerasAdapter
from tfmp.hosts.keras.compiler import UpdateCompilers
from tfmp.hosts.keras.which import keras_of
from tfmp.hosts.tf1 import TF1Adapter
from tfmp.types import Done, Gradients


class OptimizerStep(NamedTuple):
    """The part of one optimizer in a step.

    Attributes:
        adapter: The optimizer and its variables.
        given: The gradients that the user passed to `step`, or their mean over Horovod's processes. They are unscaled
            if the user called `unscale`.
        known: The result of the check in `unscale`; None if the user did not call `unscale`.
    """

    adapter: OptimizerAdapter
    given: Gradients
    known: LocalCheck | None

    @property
    def is_of_window(self) -> bool:
        """True if the gradients are the mean of an accumulator's window, which may not be usable."""
        return self.known is not None and self.known.overflow_counts is not None

    def apply_scaled(self, loss_scale: tf.Tensor, finite: tf.Tensor) -> Done:
        """Call the optimizer if it is a `ScaledGradientsOptimizer`, which then applies its gradients or skips them.

        Args:
            loss_scale: The loss scale.
            finite: A boolean scalar: are the gradients finite on every replica?
        """
        if not isinstance(self.adapter, ScaledGradientsAdapter):
            return None
        return self.adapter.apply_scaled(self.given, loss_scale if self.known is None else tf.constant(1.0), finite)

    def apply_unchecked(self) -> Done:
        """Apply the gradients without checking them, for a scaler that is not enabled."""
        own = self.apply_scaled(tf.constant(1.0), tf.constant(True))
        return self.adapter.apply(self.given) if own is None else own


def adapter_of(
    optimizer: Any,  # noqa: ANN401 - of any host
    variables: Sequence[Any],
    kwargs: Mapping[str, Any],
    compilers: UpdateCompilers,
) -> OptimizerAdapter:
    """Return an adapter for an optimizer, chosen by the optimizer's type.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        kwargs: Keyword arguments for the optimizer's `apply_gradients`.
        compilers: Whether the updates of optimizers of Keras are compiled.
    """
    if isinstance(optimizer, ScaledGradientsOptimizer):
        return ScaledGradientsAdapter(optimizer, variables)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return TF1Adapter(optimizer, variables, kwargs, leaves_out_none=True)
    of_keras = keras_of(optimizer, "optimizers.Optimizer") is not None
    if of_keras and not kwargs and compilers.of(optimizer).is_of_own_code:
        # A class that a user wrote, or changed, may do more in `apply_gradients` than Keras' own classes do.
        # Only the optimizers of Keras 3 have `apply`.
        adapter = Keras3Adapter if hasattr(optimizer, "apply") else KerasAdapter
        return adapter(optimizer, variables, compiler=compilers.of(optimizer), leaves_out_none=True)
    return OptimizerAdapter(optimizer, variables, kwargs)


def known_together(steps: Sequence[OptimizerStep]) -> LocalCheck | None:
    """Combine the earlier checks of several optimizers, which step together or not at all.

    Args:
        steps: The part of each optimizer in the step.

    Returns:
        One check for all optimizers; None if `unscale` was called for none of them.

    Raises:
        ValueError: The mean of an accumulator was not passed on whole: `step` got fewer or more gradients than the
            accumulator has variables.
    """
    checks = [step.known for step in steps if step.known is not None]
    if not checks:
        return None
    largest = [None if step.known is None else step.known.max_abs for step in steps]
    emptied = [check.emptied for check in checks if check.emptied is not None]
    return LocalCheck(
        usable=tf.reduce_all([check.usable for check in checks]),
        complete=_complete_together(checks),
        overflow_counts=_counts_together(steps),
        # If the magnitude is unknown for one optimizer, the step computes it from the gradients of all.
        max_abs=None if any(each is None for each in largest) else tf.reduce_max(largest),
        emptied=tf.group(*emptied) if emptied else None,
        checked=[grad for check in checks for grad in check.checked],
        already_checked=len(checks) == len(steps) and all(check.already_checked for check in checks),
    )


def _complete_together(checks: Sequence[LocalCheck]) -> tf.Tensor | None:
    if all(check.complete is None for check in checks):
        return None
    return tf.reduce_all([check.usable if check.complete is None else check.complete for check in checks])


def _counts_together(steps: Sequence[OptimizerStep]) -> tf.Tensor | None:
    if not any(step.is_of_window for step in steps):
        return None
    return tf.concat([_counts_of(step) for step in steps], axis=0)


def _counts_of(step: OptimizerStep) -> tf.Tensor:
    num_variables = len(step.adapter.variables)
    counts = None if step.known is None else step.known.overflow_counts
    if counts is None:
        return tf.zeros([num_variables, len(KINDS)], tf.int64)
    if counts.shape[0] != num_variables:
        raise ValueError(
            f"unscale returned {counts.shape[0]} gradients of the accumulator, and step got {num_variables}: pass all "
            "of them, None too, with the variables in the accumulator's order."
        )
    return counts
