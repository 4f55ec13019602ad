"""What one optimizer does in a step, whatever host it is of."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from tfmp.core import lists, numerics
from tfmp.core.horovods import is_horovods
from tfmp.core.overflow import KINDS
from tfmp.core.verdicts import Seen
from tfmp.types import Gradient, Gradients, GradsAndVars


@runtime_checkable
class ScaledGradientsOptimizer(Protocol):
    """An optimizer that unscales and skips by itself; `GradScaler.step` then leaves both to it.

    For an optimizer that does so in one fused kernel. Whatever has the method is taken for one. Unless a graph prunes
    it, the gradients are still unscaled beside it, to be checked.

    Example:
        >>> class Fused:
        ...     def apply_scaled_gradients(self, grads_and_vars, loss_scale, finite):
        ...         for grad, variable in grads_and_vars:
        ...             variable.assign_sub(tf.where(finite, grad / loss_scale, 0.0))
        >>> isinstance(Fused(), ScaledGradientsOptimizer)
        True

    Source: the contract of torch.amp for custom optimizers (`_step_supports_amp_scaling`).
    """

    def apply_scaled_gradients(
        self, grads_and_vars: GradsAndVars, loss_scale: tf.Tensor, finite: tf.Tensor
    ) -> tf.Operation:
        """Apply gradients of a scaled loss, if they are finite.

        Called on every replica, at every step.

        Args:
            grads_and_vars: Pairs of a gradient and its variable; none of the gradients is None.
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
        applied = self.optimizer.apply_gradients(self._pairs(grads), **self.kwargs)
        # In a function Keras returns a variable, which is nothing to wait for; in a graph of TF1 one is an assignment.
        with tf.init_scope():
            in_graph = not tf.executing_eagerly()
        parts = [each.op if in_graph and hasattr(each, "op") else each for each in tf.nest.flatten(applied)]
        return tf.group(*(each for each in parts if isinstance(each, tf.Operation | tf.Tensor)))

    def apply_scaled(self, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation | None:
        """Let an optimizer that takes scaled gradients apply them, or not; nothing for any other.

        Args:
            loss_scale: The loss scale.
            finite: Whether the gradients are finite.
        """
        if not isinstance(self.optimizer, ScaledGradientsOptimizer):
            return None
        return self.optimizer.apply_scaled_gradients(
            self._pairs(self.given), loss_scale if self.seen is None else tf.constant(1.0), finite
        )

    def apply_unchecked(self) -> tf.Operation:
        """Apply the gradients as they are."""
        own = self.apply_scaled(tf.constant(1.0), tf.constant(True))
        return self.apply(self.true_grads) if own is None else own

    def _pairs(self, grads: Gradients) -> list[tuple[Gradient, Any]]:
        # Keras warns of None.
        return [(grad, variable) for grad, variable in zip(grads, self.variables, strict=True) if grad is not None]


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

    Raises:
        ValueError: They would have to be made in a `tf.function` that makes no variables any more.
    """
    try:
        _make_variables(optimizer, variables)
    except ValueError as error:
        # Keras' are refused when they are made; TF1's when the trace ends, in TensorFlow's words.
        if tf.executing_eagerly() or "ariables" not in str(error):
            raise
        raise ValueError(
            f"{type(optimizer).__name__} has no variables yet for {', '.join(names_of(variables))}, and a tf.function "
            "makes none when it is traced again: call scaler.prepare(optimizer, variables) before the function is "
            "first called."
        ) from error


def _make_variables(optimizer: Any, variables: Sequence[Any]) -> None:  # noqa: ANN401 - of any host
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
    largest = [None if step.seen is None else step.seen.largest for step in steps]
    complete = [each.usable if each.complete is None else each.complete for each in seen]
    return Seen(
        usable=tf.reduce_all([each.usable for each in seen]),
        complete=None if all(each.complete is None for each in seen) else tf.reduce_all(complete),
        overflows=_overflows_together(steps),
        done=tf.group(*(each.done for each in seen if each.done is not None)),
        # What the others' gradients tell is asked of all.
        largest=None if any(each is None for each in largest) else tf.reduce_max(largest),
        judged=all(step.seen is not None and step.seen.judged for step in steps),
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
        TypeError: It is no optimizer; or these are no pairs.
        ValueError: It scales losses or averages gradients itself; or there is no gradient.
        NotImplementedError: A variable's "gradient" is its next value; or Keras' optimizer cannot step in the graph.
    """
    validate_optimizer(optimizer)
    pairs = lists.pairs(grads_and_vars)
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


def validate_optimizer(optimizer: Any) -> None:  # noqa: ANN401
    """Say why no step can be taken with an optimizer, if none can.

    Args:
        optimizer: What the user gave as an optimizer.

    Raises:
        TypeError: It is none.
        ValueError: It scales losses or averages gradients itself.
        NotImplementedError: It is Keras', and the step is built in a graph of TF1.
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
    with tf.init_scope():
        in_graph = not tf.executing_eagerly()
    # Those of Keras' `optimizers.legacy` have no `build`, and step in graphs.
    if in_graph and hasattr(optimizer, "build") and hasattr(optimizer, "iterations"):
        raise NotImplementedError(
            f"the optimizer is Keras' {kind}, which has no op that a session could run: in a graph of TF1 pass a "
            "tf.compat.v1.train.Optimizer, or train eagerly or in a tf.function."
        )


def validated_steps(steps: Iterable[tuple[Any, GradsAndVars]]) -> list[tuple[Any, GradsAndVars]]:
    """Return pairs of an optimizer and what it is to step with, or say why these are none.

    Args:
        steps: What the user gave.

    Raises:
        TypeError: These are no pairs.
        ValueError: There are none.
    """
    what, advice = "pairs of an optimizer and its grads_and_vars", "pass [(optimizer, zip(grads, variables)), ...]"
    listed = lists.items("steps", steps, what, advice)
    if not listed:
        raise ValueError(f"there is no optimizer to step: pass {what}.")
    for pair in listed:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"steps must be {what}, and it holds {pair!r} of type {type(pair).__name__}: {advice}.")
    return listed


def validate_kwargs(steps: Sequence[OptimizerStep]) -> None:
    """Refuse keyword arguments that not all of the optimizers take: some would step before another fails.

    Args:
        steps: What each does, all with the same arguments.

    Raises:
        TypeError: There are some, and one optimizer does not take them.
    """
    for step in steps:
        kind, given = type(step.optimizer).__name__, ", ".join(step.kwargs)
        if step.kwargs and isinstance(step.optimizer, ScaledGradientsOptimizer):
            raise TypeError(f"{kind}.apply_scaled_gradients takes no {given}: leave it out.")
        if step.kwargs and len(steps) > 1 and not isinstance(step.optimizer, tf.compat.v1.train.Optimizer):
            raise TypeError(
                f"{given} would be passed to each optimizer, and {kind} is not TF1's: leave it out, or step each "
                "optimizer by itself."
            )
