"""The part of one optimizer in a step, and the one update of all optimizers that step together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.overflow.detectors import KINDS
from tfmp.core.overflow.local_check import EarlierCheck, LocalCheck
from tfmp.core.step.choice import update_of_scaled, update_of_unscaled
from tfmp.core.step.facts import Facts
from tfmp.core.step.update import Update
from tfmp.grad_scaler.scaled_gradients import ScaledGradientsAdapter, ScaledGradientsOptimizer
from tfmp.grad_scaler.together import AdaptersTogether
from tfmp.hosts.keras.adapters import Keras3Adapter, KerasAdapter
from tfmp.hosts.keras.compiler import UpdateCompilers
from tfmp.hosts.keras.which import keras_of
from tfmp.hosts.tf1 import TF1Adapter
from tfmp.types import Done, Gradients


class OptimizerStep(NamedTuple):
    """The part of one optimizer in a step."""

    adapter: OptimizerAdapter
    #: The gradients that the user passed to `step`, or their mean over Horovod's processes. They are unscaled if the
    #: user called `unscale`.
    given: Gradients
    #: The result of the check in `unscale`; None if the user did not call `unscale`.
    known: EarlierCheck | None

    @property
    def is_of_window(self) -> bool:
        """True if the gradients are the mean of an accumulator's window, which may not be usable."""
        return self.known is not None and self.known.overflow_counts is not None

    def apply_scaled(self, loss_scale: tf.Tensor, finite: tf.Tensor) -> Done:
        """Call the optimizer if it is a `ScaledGradientsOptimizer`, which applies its gradients or skips them."""
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
    """Return the adapter for an optimizer's type; `kwargs` are passed to its `apply_gradients`."""
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


def make_variables(adapter: OptimizerAdapter) -> None:
    """Make an optimizer's own variables; if a `tf.function` can no longer make any, raise an error with advice."""
    try:
        adapter.prepare(adapter.variables)
    except ValueError as error:
        # Keras raises a ValueError, whose text contains "variables", when the variables are made. For an optimizer of
        # TensorFlow 1, TensorFlow itself raises an error at the end of the trace, which is not caught here.
        if tf.executing_eagerly() or "ariables" not in str(error):
            raise
        kind, names = type(adapter.optimizer).__name__, ", ".join(adapter.names)
        raise ValueError(
            f"{kind} has no variables yet for {names}, and a tf.function makes none when it is traced again: call "
            "scaler.prepare(optimizer, variables) before the function is first called."
        ) from error


def update_together(steps: Sequence[OptimizerStep], facts: Facts, unscale: Callable[[Gradients], Gradients]) -> Update:
    """Return one update for several optimizers, of which either all step or none.

    If the user unscaled the gradients of some optimizers only, the function `unscale` unscales those of the others.
    """
    adapters = [step.adapter for step in steps]
    adapter = adapters[0] if len(adapters) == 1 else AdaptersTogether(adapters)
    known = known_together(steps)
    if known is None:
        return update_of_scaled(adapter, [grad for step in steps for grad in step.given], facts)
    grads = [grad for step in steps for grad in (unscale(step.given) if step.known is None else step.given)]
    return update_of_unscaled(adapter, grads, facts, known)


def known_together(steps: Sequence[OptimizerStep]) -> EarlierCheck | None:
    """Combine the earlier checks of several optimizers; None if `unscale` was called for none of them."""
    checks = [step.known for step in steps if step.known is not None]
    if not checks:
        return None
    largest = [None if step.known is None else step.known.found.max_abs for step in steps]
    found = LocalCheck(
        usable=tf.reduce_all([check.found.usable for check in checks]),
        # If the magnitude is unknown for one optimizer, the step computes it from the gradients of all.
        max_abs=None if any(each is None for each in largest) else tf.reduce_max(largest),
        complete=_complete_together([check.found for check in checks]),
    )
    return EarlierCheck(
        found,
        checked=[grad for check in checks for grad in check.checked],
        of_micro_batches=len(checks) == len(steps) and all(check.of_micro_batches for check in checks),
        overflow_counts=_counts_together(steps),
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
