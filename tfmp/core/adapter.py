"""What the core asks of an optimizer, whichever host framework it comes from; `tfmp.hosts` has those of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfmp.core.distribute.horovod_detection import running_horovod, without_horovods
from tfmp.core.gradients import arithmetic
from tfmp.types import Done, Gradient, Gradients


class OptimizerAdapter:
    """An optimizer together with the variables that it trains, as a step uses it; a host overrides what differs.

    This class works with any optimizer that has a method `apply_gradients(grads_and_vars, **kwargs)`: with optimizers
    that users wrote, and in a `tfmp.GradScaler` also with those of Keras. The variables are in the order of the
    gradients; `kwargs` are keyword arguments for the optimizer's `apply_gradients`. `average` averages gradients over
    Horovod's workers, and is None if they are averaged already. `leaves_out_none` is False if the optimizer is also
    given the variables without a gradient, as without a wrapper.

    An adapter stores nothing that differs between replicas, such as gradients: the conditional calls only the adapter
    of the first replica, for all replicas, and passes these as arguments.

    Attributes:
        names: The names of the variables, or their paths in Keras 3, for reports and errors.
        dtypes: For each gradient the dtype to which it is cast, before it is checked if it could overflow in it; None
            if the gradient stays in float32.
        overwritten: The indices of the variables whose "gradient" is their next value (Keras' float8 scales). Such a
            "gradient" was never scaled.
        sums_first: True if the gradients are already summed over the replicas when they are checked. If it is False,
            the optimizer may sum them when it applies them.
    """

    sums_first = False

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of any host
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        average: Callable[[Gradients], Gradients] | None = None,
        leaves_out_none: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.variables = list(variables)
        self.names = names_of(self.variables)
        keep_float32 = takes_float32_gradients(optimizer)
        self.dtypes: Sequence[tf.DType | None] = [
            None if keep_float32 else tf.as_dtype(variable.dtype).base_dtype for variable in self.variables
        ]
        self.overwritten = frozenset(index for index, variable in enumerate(self.variables) if is_overwritten(variable))
        self._kwargs = kwargs or {}
        self._average = average
        self._leaves_out_none = leaves_out_none

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers that step together: one, except in a `tfmp.GradScaler`."""
        return (self.optimizer,)

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's own variables, such as momenta, ahead of the conditional, which must not make them."""
        # Only the optimizers of Keras have `build`.
        if hasattr(self.optimizer, "build") and not getattr(self.optimizer, "built", False):
            self.optimizer.build(variables)

    def refuse_unknown_variables(self, grads: Gradients) -> None:
        """Raise the host's own error if the optimizer was built already, without one of the variables.

        The programs that tfmp makes of an optimizer need not call the method of it that raises this error.
        """
        del grads

    def typed(self, grads: Gradients) -> list[Gradient]:
        """Cast the unscaled gradients to `dtypes`; those of the `overwritten` variables are returned unchanged."""
        return [
            grad if dtype is None or index in self.overwritten else arithmetic.cast(grad, dtype)
            for index, (grad, dtype) in enumerate(zip(grads, self.dtypes, strict=True))
        ]

    @property
    def reduces(self) -> bool:
        """True if `reduce` sums or averages over several replicas, for which gradients must be unscaled."""
        averages = self._average is not None and running_horovod() is not None
        return averages or (self.sums_first and tf.distribute.has_strategy())

    def can_unscale_late(self, grads: Gradients) -> bool:
        """Return whether finite gradients stay finite when they are unscaled and cast; False if one was not scaled."""
        return not self.overwritten and all(
            dtype == tf.float64 or (dtype in {tf.float32, None} and (grad is None or grad.dtype != tf.float64))
            for grad, dtype in zip(grads, self.dtypes, strict=True)
        )

    def reduce(self, grads: Gradients) -> Gradients:
        """Sum or average the gradients over the replicas before they are checked, if this host does so."""
        return grads if self._average is None else self._average(grads)

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients of one replica, in true magnitude."""
        applied = self.optimizer.apply_gradients(self._pairs(grads), **self._kwargs)
        with tf.init_scope():
            in_graph = not tf.executing_eagerly()
        # In a `tf.function` an optimizer of Keras returns a variable. There is nothing to wait for: a function runs its
        # assignments in any case. In a TF1 graph an optimizer may return a reference variable, whose op is the
        # assignment.
        parts = [part.op if in_graph and hasattr(part, "op") else part for part in tf.nest.flatten(applied)]
        return tf.group(*(part for part in parts if isinstance(part, tf.Operation | tf.Tensor)))

    def program(self, grads: Gradients) -> "Program | None":
        """Return the program that unscales these gradients and applies them; None if `apply` is as fast.

        It is worth it for a program that XLA compiles, also for gradients in true magnitude: there it costs nothing to
        divide by 1, and less to clip.
        """
        del grads
        return None

    def on_step(self, applied: tf.Tensor) -> Done:
        """Count what the host counts, once for a step and not for each replica; a skipped step is not `applied`."""
        del applied
        return None

    def _pairs(self, grads: Gradients) -> list[tuple[Gradient, Any]]:
        """Return what the optimizer is given."""
        pairs = zip(grads, self.variables, strict=True)
        return [pair for pair in pairs if pair[0] is not None or not self._leaves_out_none]


class Program(Protocol):
    """Unscales the gradients of one replica, clips and applies them."""

    @property
    def clips(self) -> bool:
        """True if it clips by the global norm of the gradients, which `run` then needs."""

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide gradients by the loss scale, clip and apply them.

        `norm` is their global norm before they are divided, in float64. Without it the optimizer itself clips.
        """


def names_of(variables: Iterable[Any]) -> list[str]:
    """Return the paths of Keras 3's variables, and the names of all others."""
    # An optimizer of Keras 3 can also train a `tf.Variable`, which has no path.
    return [getattr(variable, "path", variable.name) for variable in variables]


def is_overwritten(variable: Any) -> bool:  # noqa: ANN401 - of any Keras
    """Return whether the "gradient" of a variable is its next value, as for the float8 scales of Keras."""
    return getattr(variable, "overwrite_with_gradient", False)


def takes_float32_gradients(optimizer: object) -> bool:
    """Return whether an optimizer asks for float32 gradients of half-precision variables, as those of `tfmp.bert` do.

    In the type of the variable, small gradients would be 0. An optimizer that Horovod wraps is asked itself; of a
    MultiOptimizer of Keras, it is enough that one optimizer in it asks.
    """
    asked = without_horovods(optimizer)
    return any(getattr(each, "takes_float32_gradients", False) for each in (asked, *getattr(asked, "optimizers", ())))
