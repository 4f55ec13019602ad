"""The adapter for optimizers of TensorFlow 1."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import messages
from tfmp.core.adapter import OptimizerAdapter
from tfmp.core.distribute import Distribution, SingleProcess
from tfmp.core.tensorflow_internals import make_slots
from tfmp.types import Done, Gradients

#: The ops by which a `SyncReplicasOptimizer` takes a mean from an accumulator, and those that set the latter's step.
_STEP_OF_ACCUMULATOR = {
    "ResourceAccumulatorTakeGradient": tf.raw_ops.ResourceAccumulatorSetGlobalStep,
    "SparseAccumulatorTakeGradient": tf.raw_ops.AccumulatorSetGlobalStep,
}


def keep_workers_in_step(step: tf.Operation, grads: Gradients, global_step: tf.Variable | None) -> tf.Operation:
    """Return the op of a step after which the workers of a `SyncReplicasOptimizer` go on, even if it was skipped.

    That optimizer, around the wrapper, has an accumulator for each variable, which ignores gradients of a lower step
    than its own. Its step goes up whenever its mean is taken; `global_step`, which the workers get, does not go up
    after a skipped step.
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

    Beside the arguments of `OptimizerAdapter`:

    Args:
        global_step: Incremented when the gradients are applied; None if there is none, or if `kwargs` contains it.
        distribution: How the replicas act together, of which one increments the global step for all.
        name_scope: The full name, with a slash at its end, of the scope in which the optimizer makes its variables; by
            default the current scope.
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - TensorFlow ships no types
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        average: Callable[[Gradients], Gradients] | None = None,
        leaves_out_none: bool = True,
        global_step: tf.Variable | None = None,
        distribution: Distribution | None = None,
        name_scope: str | None = None,
    ) -> None:
        if global_step is not None:
            kwargs = {**(kwargs or {}), "global_step": global_step}
        super().__init__(optimizer, variables, kwargs, average=average, leaves_out_none=leaves_out_none)
        self._global_step = global_step
        self._distribution = distribution or SingleProcess()
        self._name_scope = name_scope

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's slot variables, such as momenta, in eager code.

        In eager code the optimizer would make them in the first step that is applied. A `tf.train.Checkpoint` restores
        them when they are made, so a checkpoint that is saved before would lack them.
        """
        with tf.init_scope():
            if tf.executing_eagerly() and not tf.distribute.has_strategy():
                make_slots(self.optimizer, variables)

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients of one replica, and increment the global step by exactly one.

        Some optimizers increment it themselves, and some do not, such as that of BERT.
        """
        global_step = self._global_step
        # TensorFlow enters a name scope whose name ends in a slash as it is, without the current scope in front.
        with contextlib.nullcontext() if self._name_scope is None else tf.name_scope(self._name_scope):
            if global_step is None:
                return super().apply(grads)
            # Before the optimizer runs, which may increment the variable.
            target = global_step.read_value() + 1
            with tf.control_dependencies([target]):
                applied = super().apply(grads)

            def advance() -> Done:
                missing = tf.less(global_step.read_value(), target)
                return tf.group(global_step.assign_add(tf.cast(missing, target.dtype)))

            with tf.control_dependencies([] if applied is None else [applied]):
                return self._distribution.once(advance)
