"""How the core works with the optimizers of each Keras."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapter import OptimizerAdapter
from tfmp.core.tracing import outside_of_functions
from tfmp.hosts.keras.internals import refuse_unknown
from tfmp.hosts.keras.own_code import is_foreign
from tfmp.hosts.keras.program import KerasProgram, UpdateCompiler
from tfmp.hosts.keras.views import view_of
from tfmp.types import Done, Gradient, Gradients


class KerasAdapter(OptimizerAdapter):
    """The adapter for an optimizer of Keras, which unscales gradients in the program that applies them, if it can.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        kwargs: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
        compiler: Says whether XLA compiles the program that unscales gradients and applies them; None if gradients are
            to be unscaled before they come here.
        leaves_out_none: True if variables without a gradient are not passed to the optimizer, which warns of them.
        method: The method of an optimizer of Keras 3 that is called, which a subclass may override: "apply_gradients"
            or "apply".
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of any Keras
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        compiler: UpdateCompiler | None = None,
        leaves_out_none: bool = False,
        method: str = "apply_gradients",
    ) -> None:
        super().__init__(optimizer, variables, kwargs)
        self._compiler = compiler
        self._leaves_out_none = leaves_out_none
        self._method = method

    def refuse_unknown_variables(self, grads: Gradients) -> None:
        """Raise Keras' own error if the optimizer was built without a variable that has a gradient."""
        self._refuse_unknown([variable for _, variable in self._without_none(grads)])

    def _refuse_unknown(self, variables: Sequence[Any]) -> None:
        # A user's class may need no place for a variable, or filter variables before Keras looks at them.
        methods = (getattr(self.optimizer, name, None) for name in ("build", "apply_gradients", "apply"))
        if not any(map(is_foreign, methods)):
            refuse_unknown(self.optimizer, variables)

    def program(self, grads: Gradients) -> KerasProgram | None:
        """Return the program that unscales these gradients and applies them, if XLA compiles it.

        There is none under a `tf.distribute` strategy: the check needs unscaled gradients there, to find out whether
        their sum over the replicas could overflow.
        """
        if self._compiler is None or tf.distribute.has_strategy() or not self.can_unscale_late(grads):
            return None
        taken = [index for index, grad in enumerate(grads) if grad is not None or not self._leaves_out_none]
        program = KerasProgram(self._compiler, self.variables, taken, self._method, self._kwargs)
        return program if program.is_compiled else None

    def can_unscale_late(self, grads: Gradients) -> bool:
        """Return whether it makes no difference if these scaled gradients are unscaled before or after the check.

        It does if a variable has float8 scales: their next values, which come as "gradients", must not be divided by
        the loss scale.
        """
        return not self.overwritten and all(map(_can_be_unscaled_late, grads, self.dtypes))


class Keras2Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 2; the gradients are summed over the replicas before they are checked.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        kwargs: Keyword arguments for the optimizer's `apply_gradients`.
        compiler: Says whether the program is compiled; None if gradients are to be unscaled before they come here.
        aggregates: True if `reduce` shall sum the gradients over the replicas; False if the caller has summed them
            already.
        average: Averages gradients over Horovod's workers; None if they are averaged already.
        counts_skipped_steps: True if a skipped step also increments `iterations`, as in Keras' own
            `LossScaleOptimizer`.
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of either package
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        compiler: UpdateCompiler | None = None,
        aggregates: bool = True,
        average: Callable[[Gradients], Gradients] | None = None,
        counts_skipped_steps: bool = False,
    ) -> None:
        super().__init__(optimizer, variables, kwargs, compiler=compiler)
        self.sums_first = True
        self._aggregates = aggregates
        self._average = average
        self._counts_skipped_steps = counts_skipped_steps

    def program(self, grads: Gradients) -> KerasProgram | None:
        """Return the program that unscales these gradients and applies them, if none of it is a user's."""
        # A user's own `aggregate_gradients` may do more than sum.
        return None if is_foreign(self.optimizer.aggregate_gradients) else super().program(grads)

    def reduce(self, grads: Gradients) -> Gradients:
        """Sum the gradients over the replicas, and average them over Horovod's workers, unless that is done already."""
        if self._aggregates:
            grads = [grad for grad, _ in self.optimizer.aggregate_gradients(self._pairs(grads))]
        return grads if self._average is None else self._average(grads)

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients, which are already summed over the replicas."""
        with self._summing_nothing() as optimizer:
            optimizer.apply_gradients(self._pairs(grads), skip_gradients_aggregation=True, **self._kwargs)
        return tf.no_op()

    def _summing_nothing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a user's `apply_gradients` may drop the argument that says what is summed."""
        if tf.distribute.has_strategy() and is_foreign(self.optimizer.apply_gradients):
            return view_of(self.optimizer, aggregate_gradients=list)
        return contextlib.nullcontext(self.optimizer)

    def on_step(self, applied: tf.Tensor) -> Done:
        """Increment the optimizer's `iterations` after a skipped step, if they are to count skipped steps."""
        if not self._counts_skipped_steps:
            return None
        iterations = self.optimizer.iterations
        return tf.group(iterations.assign_add(tf.cast(tf.logical_not(applied), iterations.dtype)))


class Keras3Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 3."""

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's own variables; outside of a function that is being traced, so that it is traced once."""
        outside_of_functions(functools.partial(super().prepare, variables))

    def refuse_unknown_variables(self, grads: Gradients) -> None:
        """Raise Keras' own error if the optimizer was built without one of the variables."""
        if self._leaves_out_none:
            super().refuse_unknown_variables(grads)
        else:
            # Keras 3 looks at the variables without a gradient too.
            self._refuse_unknown(self.variables)

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients of one replica."""
        if self._leaves_out_none:
            return super().apply(grads)
        if self._method == "apply":
            self.optimizer.apply(list(grads), self.variables)
        else:
            self.optimizer.apply_gradients(self._pairs(grads))
        return tf.no_op()


def _can_be_unscaled_late(grad: Gradient, dtype: tf.DType | None) -> bool:
    """Return whether a finite scaled gradient stays finite when it is unscaled and cast to the dtype of `dtypes`."""
    return dtype == tf.float64 or (dtype in {tf.float32, None} and (grad is None or grad.dtype != tf.float64))
