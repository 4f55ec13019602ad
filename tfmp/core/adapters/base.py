"""All that the core needs to know of an optimizer, whatever its host framework."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.types import Gradient, Gradients


class OptimizerAdapter:
    """An optimizer and the variables that it trains, as `LossScaler` sees them.

    This class serves any optimizer with `apply_gradients(grads_and_vars, **kwargs)`: those of users, and in a
    `tfmp.GradScaler` also those of Keras. A subclass for each host framework overrides what its front-end needs. An
    adapter holds no gradient: what differs between the replicas of a strategy travels as an argument, because a
    strategy calls the functions of its first replica for all.

    Args:
        optimizer: The optimizer.
        variables: The variables, in the order of the gradients.
        kwargs: Keyword arguments for the optimizer's `apply_gradients`.

    Attributes:
        optimizer: The optimizer.
        variables: The variables.
        names: The names of the variables, or their paths in Keras 3, for reports and errors.
        dtypes: The type that each gradient is cast to before it is checked, because an unscaled gradient can overflow
            the type of its variable; None for a gradient that stays in float32.
        overwritten: Indices of variables whose "gradient" is their next value, which was never scaled.
        sums_first: Whether `reduce` sums gradients over the replicas before the check. Otherwise the optimizer may sum
            them when it applies them.

    Example:
        >>> class Descent:
        ...     def apply_gradients(self, grads_and_vars):
        ...         for grad, variable in grads_and_vars:
        ...             variable.assign_sub(grad)
        >>> w, b = tf.Variable(1.0, name="w"), tf.Variable(1.0, name="b")
        >>> adapter = OptimizerAdapter(Descent(), [w, b])
        >>> adapter.apply([tf.constant(0.25), None])
        >>> adapter.names, float(w), float(b)
        (['w:0', 'b:0'], 0.75, 1.0)
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of any host
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.variables = list(variables)
        self.names = names_of(self.variables)
        self.dtypes: Sequence[tf.DType | None] = [tf.as_dtype(variable.dtype).base_dtype for variable in self.variables]
        self.overwritten = frozenset(index for index, variable in enumerate(self.variables) if is_overwritten(variable))
        self.sums_first = False
        self._kwargs = kwargs or {}

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's own variables, such as momenta, which must not be made inside a conditional.

        Args:
            variables: The variables that need them.
        """
        # Keras' optimizers have the method.
        if hasattr(self.optimizer, "build") and not getattr(self.optimizer, "built", False):
            self.optimizer.build(variables)

    def typed(self, grads: Gradients) -> list[Gradient]:
        """Return the gradients in `dtypes`; those of `overwritten` variables stay as they are.

        Args:
            grads: The gradients in true magnitude, one for each variable.
        """
        return [
            grad if dtype is None or index in self.overwritten else arithmetic.cast(grad, dtype)
            for index, (grad, dtype) in enumerate(zip(grads, self.dtypes, strict=True))
        ]

    def unscales(self, grads: Gradients) -> bool:
        """Tell whether `apply` can unscale these gradients itself, inside the program that applies them.

        Args:
            grads: Gradients of a scaled loss.
        """
        del grads
        return False

    def reduce(self, grads: Gradients) -> Gradients:
        """Sum gradients over the replicas, for a host that does so before it applies them.

        Args:
            grads: The replica's gradients.
        """
        return grads

    def measure(self, grads: Gradients, loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
        """Return what `apply` needs to know of the gradients and what is cheaper to compute beside the check.

        Args:
            grads: The replica's gradients.
            loss_scale: As in `apply`.
        """
        del grads, loss_scale
        return []

    def apply(
        self, grads: Gradients, loss_scale: tf.Tensor | None = None, measures: Sequence[tf.Tensor] = ()
    ) -> tf.Operation:
        """Apply the gradients of one replica.

        Args:
            grads: The gradients.
            loss_scale: What to divide them by, a float32 scalar; None if they are in true magnitude.
            measures: What `measure` returned of them.

        Returns:
            The op that applies them; None in eager mode.
        """
        # These two are for adapters that unscale.
        del loss_scale, measures
        return finished(self.optimizer.apply_gradients(self._without_none(grads), **self._kwargs))

    def on_step(self, applied: tf.Tensor) -> tf.Operation | None:
        """Do what the host does once for each step, and once for all replicas.

        Args:
            applied: A boolean scalar: was the step applied?

        Returns:
            The op that does it; None if there is nothing to do.
        """
        del applied
        return None

    def _pairs(self, grads: Gradients) -> list[tuple[Gradient, Any]]:
        return list(zip(grads, self.variables, strict=True))

    def _without_none(self, grads: Gradients) -> list[tuple[Gradient, Any]]:
        return [(grad, variable) for grad, variable in self._pairs(grads) if grad is not None]


def names_of(variables: Iterable[Any]) -> list[str]:
    """Return the paths of Keras 3's variables, and the names of all others.

    Args:
        variables: Variables of TensorFlow or Keras.
    """
    # Keras 3 also takes TensorFlow's own variables, which have no path.
    return [getattr(variable, "path", variable.name) for variable in variables]


def is_overwritten(variable: Any) -> bool:  # noqa: ANN401 - of any Keras
    """Tell whether the "gradient" of a variable is its next value, as Keras has it for float8 scales.

    Args:
        variable: A variable of TensorFlow or Keras.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def finished(applied: Any) -> tf.Operation:  # noqa: ANN401 - whatever `apply_gradients` returns
    """Return an op that runs when an optimizer has applied its gradients.

    Args:
        applied: What its `apply_gradients` returned.
    """
    with tf.init_scope():
        in_graph = not tf.executing_eagerly()
    # In a function Keras returns a variable, which is nothing to wait for. In a graph of TensorFlow 1 an optimizer may
    # return a reference variable, whose op is the assignment.
    parts = [part.op if in_graph and hasattr(part, "op") else part for part in tf.nest.flatten(applied)]
    return tf.group(*(part for part in parts if isinstance(part, tf.Operation | tf.Tensor)))
