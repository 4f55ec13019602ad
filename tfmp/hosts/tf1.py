"""The adapter for optimizers of TensorFlow 1."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import messages
from tfmp.core.adapter import OptimizerAdapter, finished
from tfmp.core.distribute import Distribution
from tfmp.core.tensorflow_internals import make_slots
from tfmp.types import Done, Gradients

#: The ops by which a `SyncReplicasOptimizer` takes the mean of its workers' gradients from an accumulator, each with
#: the op that sets the step of this accumulator.
_STEP_OF_ACCUMULATOR = {
    "ResourceAccumulatorTakeGradient": tf.raw_ops.ResourceAccumulatorSetGlobalStep,
    "SparseAccumulatorTakeGradient": tf.raw_ops.AccumulatorSetGlobalStep,
}


class GlobalStepCounter:
    """Increments a global step by exactly one per step, whether or not the optimizer increments it.

    Not every optimizer of TensorFlow 1 increments the global step that it is given: BERT's, for example, does not. Of
    several replicas, one increments the variable for all.
    """

    def __init__(self, global_step: tf.Variable, distribution: Distribution) -> None:
        self._global_step = global_step
        self._distribution = distribution

    def count(self, apply: Callable[[tf.Variable], Any]) -> Done:
        """Call `apply` with the global step, to apply gradients, and increment the global step if it did not."""
        # The target is computed before the optimizer runs, because the optimizer may increment the variable.
        target = self._global_step.read_value() + 1
        with tf.control_dependencies([target]):
            applied = finished(apply(self._global_step))

        def advance() -> Done:
            missing = tf.less(self._global_step.read_value(), target)
            return tf.group(self._global_step.assign_add(tf.cast(missing, target.dtype)))

        with tf.control_dependencies([] if applied is None else [applied]):
            return self._distribution.once(advance)


def keep_workers_in_step(step: tf.Operation, grads: Gradients, global_step: tf.Variable | None) -> tf.Operation:
    """Return the op of a step after which the workers of a `SyncReplicasOptimizer` go on, even if it was skipped.

    That optimizer, around the wrapper, has an accumulator for each variable, which ignores the gradients of a worker
    whose step is lower than its own. The step of an accumulator goes up whenever its mean is taken. The workers get
    `global_step`, which a skipped step leaves as it is: from then on, all their gradients would be ignored.
    """
    means = [op for op in messages.ops_of(grads) if op.type in _STEP_OF_ACCUMULATOR]
    if not means or global_step is None:
        return step
    with tf.control_dependencies([step]):
        reached = tf.cast(global_step.read_value(), tf.int64)
    done = [step]
    for mean in means:
        accumulator = mean.inputs[0]
        # Accumulators are where their variables are, perhaps on another machine than the global step.
        with tf.device(None), tf.device(accumulator.device):
            done.append(_STEP_OF_ACCUMULATOR[mean.type](handle=accumulator, new_global_step=reached))
    return tf.group(done)


class TF1Adapter(OptimizerAdapter):
    """The adapter for a `tf.compat.v1.train.Optimizer`.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        kwargs: Keyword arguments for the optimizer's `apply_gradients`.
        counter: Increments the global step when the gradients are applied; None if there is no global step to count, or
            if `kwargs` contains it.
        name_scope: The full name, with a slash at its end, of the scope in which the optimizer makes its variables; by
            default the current scope.
        leaves_out_none: True if the optimizer gets no pair whose gradient is None. By default it gets all pairs, as it
            does without a wrapper.
        average: Averages gradients over Horovod's workers; None if they are averaged already.
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - TensorFlow ships no types
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        counter: GlobalStepCounter | None = None,
        name_scope: str | None = None,
        leaves_out_none: bool = False,
        average: Callable[[Gradients], Gradients] | None = None,
    ) -> None:
        super().__init__(optimizer, variables, kwargs)
        self._counter = counter
        self._name_scope = name_scope
        self._leaves_out_none = leaves_out_none
        self._average = average

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's slot variables, such as momenta, in eager code.

        In a graph the optimizer itself makes them outside the conditional. In eager code it would make them in the
        first step that is applied. A `tf.train.Checkpoint` restores slots at the moment when they are made. If the
        first step were skipped, the next checkpoint would be saved without them.
        """
        with tf.init_scope():
            if tf.executing_eagerly() and not tf.distribute.has_strategy():
                make_slots(self.optimizer, variables)

    def reduce(self, grads: Gradients) -> Gradients:
        """Average the gradients over Horovod's workers, if that was left to the step."""
        return grads if self._average is None else self._average(grads)

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients of one replica, and count the step."""
        pairs = self._without_none(grads) if self._leaves_out_none else self._pairs(grads)
        # TensorFlow enters a name scope whose name ends in a slash as it is, without the current scope in front.
        with contextlib.nullcontext() if self._name_scope is None else tf.name_scope(self._name_scope):
            if self._counter is None:
                return finished(self.optimizer.apply_gradients(pairs, **self._kwargs))
            return self._counter.count(
                lambda global_step: self.optimizer.apply_gradients(pairs, global_step=global_step, **self._kwargs)
            )
