"""What one optimizer does in a step, whatever host it is of."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from tfmp.core import numerics
from tfmp.core.horovods import is_horovods
from tfmp.core.overflow import KINDS
from tfmp.core.scaler import Seen
from tfmp.types import Gradient, Gradients, GradsAndVars


@runtime_checkable
class ScaledGradientsOptimizer(Protocol):
    """An optimizer that unscales and skips by itself; `GradScaler.step` then leaves both to it.

    For an optimizer that can do so cheaper, as in one fused kernel. Whatever has the method is taken for one.

    Source: the contract of torch.amp for custom optimizers (`_step_supports_amp_scaling`).
    """

    def apply_scaled_gradients(
        self, grads_and_vars: GradsAndVars, loss_scale: tf.Tensor, finite: tf.Tensor
    ) -> tf.Operation:
        """Apply gradients of a scaled loss, if they are finite.

        Called on every replica, at every step.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
            loss_scale: What to divide the gradients by, a float32 scalar; 1 if they were unscaled before.
            finite: Whether they are finite on every replica, a boolean scalar. Where it is False, nothing may change.

        Returns:
            The op that does it; None in eager mode.
        """


class OptimizerStep(NamedTuple):
    """What one optimizer does in a step.

    Attributes:
        optimizer: The optimizer.
        given: The gradients as they were given, or their mean over Horovod's processes.
        true_grads: In true magnitude.
        variables: Their variables.
        seen: What was seen of them when they were unscaled; None if that was not by the user.
        kwargs: For the optimizer's `apply_gradients`.
    """

    optimizer: Any
    given: Gradients
    true_grads: Gradients
    variables: Sequence[Any]
    seen: Seen | None
    kwargs: dict[str, Any]

    @property
    def is_of_window(self) -> bool:
        """Whether the gradients are those of an accumulator, whose window may be of no use."""
        return self.seen is not None and self.seen.complete is not None

    def typed_grads(self) -> list[Gradient]:
        """Return the gradients in true magnitude, in the variables' types, in which they must be finite."""
        return [
            numerics.cast(grad, tf.as_dtype(variable.dtype).base_dtype)
            for grad, variable in zip(self.true_grads, self.variables, strict=True)
        ]

    def apply(self, grads: Gradients) -> tf.Operation:
        """Apply gradients in true magnitude; nothing if the optimizer takes scaled ones.

        Args:
            grads: The gradients.
        """
        if isinstance(self.optimizer, ScaledGradientsOptimizer):
            return tf.no_op()
        # Keras warns of None.
        pairs = [(grad, variable) for grad, variable in zip(grads, self.variables, strict=True) if grad is not None]
        applied = self.optimizer.apply_gradients(pairs, **self.kwargs)
        # Keras returns a variable.
        return applied if isinstance(applied, tf.Operation) else tf.no_op()

    def apply_scaled(self, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation | None:
        """Let an optimizer that takes scaled gradients apply them, or not; nothing for any other.

        Args:
            loss_scale: The loss scale.
            finite: Whether the gradients are finite.
        """
        if not isinstance(self.optimizer, ScaledGradientsOptimizer):
            return None
        pairs = list(zip(self.given, self.variables, strict=True))
        return self.optimizer.apply_scaled_gradients(
            pairs, loss_scale if self.seen is None else tf.constant(1.0), finite
        )

    def apply_unchecked(self) -> tf.Operation:
        """Apply the gradients as they are."""
        own = self.apply_scaled(tf.constant(1.0), tf.constant(True))
        return self.apply(self.true_grads) if own is None else own


def names_of(variables: Sequence[Any]) -> list[str]:
    """Return the names of variables.

    Args:
        variables: Of TensorFlow or Keras.
    """
    # Keras' variables have paths; it also takes TensorFlow's own.
    return [getattr(variable, "path", variable.name) for variable in variables]


def make_variables(optimizer: Any, variables: Sequence[Any]) -> None:  # noqa: ANN401 - of any host
    """Make an optimizer's variables, which must not be made in a conditional.

    Args:
        optimizer: The optimizer.
        variables: Those that it trains, also those that have no gradient at first.
    """
    build = getattr(optimizer, "build", None)
    if build is not None:
        if not getattr(optimizer, "built", False):
            build(variables)
        return
    with tf.init_scope():
        # In a graph they are made outside of conditionals by themselves.
        of_tf1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
        if tf.executing_eagerly() and not tf.distribute.has_strategy() and of_tf1:
            # What its subclasses override; a user's own optimizer may do without.
            optimizer._create_slots(variables)


def seen_together(steps: Sequence[OptimizerStep]) -> Seen | None:
    """Return what was seen of the gradients of several optimizers, which step together or not at all.

    Args:
        steps: What each does.
    """
    if all(step.seen is None for step in steps):
        return None
    seen = [step.seen for step in steps if step.seen is not None]
    complete = [each.usable if each.complete is None else each.complete for each in seen]
    return Seen(
        usable=tf.reduce_all([each.usable for each in seen]),
        complete=None if all(each.complete is None for each in seen) else tf.reduce_all(complete),
        overflows=_overflows_together(steps),
        done=tf.group(*(each.done for each in seen if each.done is not None)),
    )


def _overflows_together(steps: Sequence[OptimizerStep]) -> tf.Tensor | None:
    known = [None if step.seen is None else step.seen.overflows for step in steps]
    if all(overflows is None for overflows in known):
        return None
    for step, overflows in zip(steps, known, strict=True):
        if overflows is not None and overflows.shape[0] != len(step.variables):
            raise ValueError(
                f"unscale returned {overflows.shape[0]} gradients of the accumulator, and step got "
                f"{len(step.variables)}: pass all of them, None too, with the variables in the accumulator's order."
            )
    return tf.concat(
        [
            tf.zeros([len(step.variables), len(KINDS)], tf.int64) if overflows is None else overflows
            for step, overflows in zip(steps, known, strict=True)
        ],
        axis=0,
    )


def validated_pairs(optimizer: Any, grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Any]]:  # noqa: ANN401
    """Return the pairs of gradients and variables that a step is to be taken with, or say why none can be.

    Args:
        optimizer: What the user gave as an optimizer.
        grads_and_vars: What the user gave for it.

    Raises:
        TypeError: It is no optimizer.
        ValueError: It scales losses or averages gradients itself; or there is no gradient.
        NotImplementedError: A variable's "gradient" is its next value.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, ScaledGradientsOptimizer) and not hasattr(optimizer, "apply_gradients"):
        raise TypeError(
            f"optimizer must be an optimizer of Keras or TF1, with apply_gradients, got {optimizer!r} of type {kind}."
        )
    if "LossScaleOptimizer" in kind:
        raise ValueError(f"the optimizer is a {kind}, which scales the loss itself: step with the optimizer inside it.")
    if is_horovods(optimizer):
        raise ValueError(
            "the optimizer is one of Horovod's, which averages gradients itself: step with the optimizer inside it, "
            "and pass is_distributed=True to tfmp.GradScaler."
        )
    pairs = list(grads_and_vars)
    if all(grad is None for grad, _ in pairs):
        raise ValueError(
            "there are no gradients to step with: pass pairs of a gradient and its variable, of which one gradient at "
            "least is not None."
        )
    if any(getattr(variable, "overwrite_with_gradient", False) for _, variable in pairs):
        raise NotImplementedError(
            "a variable of float8 scales takes its next value for a gradient, which would be unscaled: train it with "
            "tfmp.LossScaleOptimizer."
        )
    return pairs
