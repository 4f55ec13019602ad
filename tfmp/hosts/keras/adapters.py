"""How the core works with the optimizers of each Keras."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.any_keras.internals import refuse_unknown, view_of
from tfmp.any_keras.which import is_foreign, is_optimizer_of_keras3
from tfmp.core.adapter import OptimizerAdapter
from tfmp.core.tensorflow_internals import within_xla
from tfmp.core.tracing import outside_of_functions
from tfmp.hosts.keras.program import KerasProgram, UpdatePrograms
from tfmp.types import Done, Gradients


class KerasAdapter(OptimizerAdapter):
    """The adapter for an optimizer of Keras, which unscales gradients in the program that applies them, if it can.

    Beside the arguments of `OptimizerAdapter`:

    Args:
        programs: Say whether XLA compiles the update; None if it never does.
        is_summed: True if the gradients are summed over the replicas already; for an optimizer of Keras 2.
        counts_skipped_steps: True if a skipped step also increments `iterations`, as in the own wrapper of Keras 2.
        method: The method of an optimizer of Keras 3 that is called: "apply_gradients" or "apply".
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of any Keras
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        average: Callable[[Gradients], Gradients] | None = None,
        leaves_out_none: bool = True,
        programs: UpdatePrograms | None = None,
        is_summed: bool = False,
        counts_skipped_steps: bool = False,
        method: str = "apply_gradients",
    ) -> None:
        super().__init__(optimizer, variables, kwargs, average=average, leaves_out_none=leaves_out_none)
        self._programs = programs
        self._is_summed = is_summed
        self._counts_skipped_steps = counts_skipped_steps
        self._method = method

    def refuse_unknown_variables(self, grads: Gradients) -> None:
        """Raise Keras' own error if the optimizer was built without a variable that it is given."""
        # A user's class may filter variables before Keras looks at them.
        methods = (getattr(self.optimizer, name, None) for name in ("build", "apply_gradients", "apply"))
        if not any(map(is_foreign, methods)):
            # Keras 2 looks at no variable without a gradient.
            is_keras3 = is_optimizer_of_keras3(self.optimizer)
            given = [variable for grad, variable in self._pairs(grads) if grad is not None or is_keras3]
            refuse_unknown(self.optimizer, given)

    def program(self, grads: Gradients) -> KerasProgram | None:
        """Return the program that unscales these gradients and applies them, if XLA compiles it."""
        # On replicas the optimizer sums gradients, which a program cannot.
        if self._programs is None or tf.distribute.has_strategy() or not self.can_unscale_late(grads):
            return None
        taken = [index for index, grad in enumerate(grads) if grad is not None or not self._leaves_out_none]
        variables = [self.variables[index] for index in taken]
        if not (within_xla() or self._programs.compiles(variables)):
            return None
        return KerasProgram(self._programs, taken, variables, self._method, self._kwargs)

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
        if not self.optimizer.built:
            outside_of_functions(lambda: self.optimizer.build(variables))

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients of one replica."""
        if self._method == "apply":
            self.optimizer.apply(list(grads), self.variables)
        else:
            self.optimizer.apply_gradients(self._pairs(grads))
        return tf.no_op()


class Keras2Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 2; the gradients are summed over the replicas before they are checked."""

    sums_first = True

    def can_unscale_late(self, grads: Gradients) -> bool:
        """Return whether finite gradients stay finite when they are unscaled, cast and applied."""
        # A user's own `aggregate_gradients` may do more than sum.
        return not is_foreign(self.optimizer.aggregate_gradients) and super().can_unscale_late(grads)

    def reduce(self, grads: Gradients) -> Gradients:
        """Sum the gradients over the replicas, and average them over Horovod's workers, unless that is done already."""
        if not self._is_summed:
            grads = [grad for grad, _ in self.optimizer.aggregate_gradients(self._pairs(grads))]
        return super().reduce(grads)

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients, which are already summed over the replicas."""
        # A user's `apply_gradients` may drop the argument that says so.
        may_sum = tf.distribute.has_strategy() and is_foreign(self.optimizer.apply_gradients)
        view = view_of(self.optimizer, aggregate_gradients=list) if may_sum else contextlib.nullcontext(self.optimizer)
        with view as optimizer:
            optimizer.apply_gradients(self._pairs(grads), skip_gradients_aggregation=True, **self._kwargs)
        return tf.no_op()


class LegacyAdapter(KerasAdapter):
    """The adapter for an optimizer of `keras.optimizers.legacy`, which sums the gradients over the replicas itself.

    A user's class may clip gradients before it sums them.
    """

    def __init__(self, *args: Any, is_summed: bool = False, **kwargs: Any) -> None:  # noqa: ANN401 - as `KerasAdapter`
        super().__init__(*args, is_summed=is_summed, **kwargs)
        self.sums_first = is_summed
        # A user's class may not have this argument, whose default is True.
        if is_summed:
            self._kwargs = {**self._kwargs, "experimental_aggregate_gradients": False}

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make `iterations`, the hyperparameters and the slots."""
        # `apply_gradients` calls this private method, and Addons' wrappers extend it. A `Saver` needs the same names.
        with tf.name_scope(self.optimizer._name), tf.init_scope():
            self.optimizer._create_all_weights(variables)
