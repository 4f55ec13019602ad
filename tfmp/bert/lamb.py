"""The LAMB that BERT was trained with in large batches."""

import math
from collections.abc import Iterable

import tensorflow as tf

from tfmp.bert.optimizers import AdamWeightDecayOptimizer
from tfmp.types import GradsAndVars


class LAMBOptimizer(AdamWeightDecayOptimizer):
    """Adam with decoupled weight decay, whose step is as long as a share of the weights: for very large batches.

    For each variable `w` with gradient `g`, at the step `t` that is counted from 1:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        update = (m / (1 - beta_1 ** t)) / (sqrt(v / (1 - beta_2 ** t)) + epsilon) + weight_decay_rate * w
        w -= learning_rate * norm(w) / norm(update) * update

    The ratio of norms is 1 where one of them is 0. `t` is the global step, which `apply_gradients` therefore needs,
    plus 1: so there is no variable beyond the moments, and checkpoints of NVIDIA's optimizer restore. That one takes
    `t` from the global step as it is, where the first update of a training is 0 / 0.

    All else is as in `AdamWeightDecayOptimizer`, the float32 copies of half-precision variables too.

    Args:
        learning_rate: A number of at least 0, a floating-point scalar tensor or, in eager code, a variable. In a graph
            it can be fetched as `learning_rate:0`.
        weight_decay_rate: The share of a weight that decays in a step whose learning rate is 1; at least 0.
        beta_1: The share of the first moment that each step keeps; at least 0, below 1.
        beta_2: That of the second moment, within the same bounds.
        epsilon: Added to the root of the second moment, of a gradient's unit; above 0.
        exclude_from_weight_decay: Regular expressions; a variable whose name holds one does not decay.
        name: The optimizer's name.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> w, global_step = tf.Variable([3.0, 4.0]), tf.Variable(0, dtype=tf.int64)
        >>> LAMBOptimizer(0.5).apply_gradients([(tf.constant([1.0, 1.0]), w)], global_step)
        >>> [round(value, 3) for value in w.numpy().tolist()], int(global_step)
        ([1.232, 2.232], 1)

    Source: "Large Batch Optimization for Deep Learning" (https://arxiv.org/abs/1904.00962); NVIDIA's
    DeepLearningExamples.
    """

    # What one call of `apply_gradients` works with, as in TensorFlow's own optimizers.
    _global_step: tf.Variable
    _corrections: tuple[tf.Tensor, tf.Tensor]

    def __init__(
        self,
        learning_rate: float | tf.Tensor,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Iterable[str] | None = None,
        name: str = "LAMBOptimizer",
    ) -> None:
        super().__init__(learning_rate, weight_decay_rate, beta_1, beta_2, epsilon, exclude_from_weight_decay, name)

    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        global_step: tf.Variable | None = None,
        name: str | None = None,
        manual_fp16: bool = False,
    ) -> tf.Operation:
        """Apply the gradients, then add one to the global step.

        Args:
            grads_and_vars: Pairs of gradient and variable, of one shape; None for a gradient leaves a variable out.
            global_step: Steps applied so far, an integer variable.
            name: A name for the op.
            manual_fp16: As in `AdamWeightDecayOptimizer`: both values do the same.

        Returns:
            The op that does so; None in eager mode.

        Raises:
            TypeError: These are no such pairs.
            ValueError: There is no global step, or no gradient at all.
        """
        if global_step is None:
            raise ValueError(
                "LAMBOptimizer corrects its moments by the global step: pass global_step to apply_gradients or "
                "minimize, tf.compat.v1.train.get_or_create_global_step() in a graph."
            )
        self._global_step = global_step
        return super().apply_gradients(grads_and_vars, global_step, name, manual_fp16)

    def _prepare(self) -> None:
        # Here, and once for all variables: it is read before the step is counted, as every update needs it.
        steps = tf.cast(tf.convert_to_tensor(self._global_step), tf.float32) + 1
        self._corrections = _one_minus_power(self.beta_1, steps), _one_minus_power(self.beta_2, steps)

    def _direction(self, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        of_first, of_second = (tf.cast(correction, first.dtype) for correction in self._corrections)
        return super()._direction(first / of_first, second / of_second)

    def _scaled(self, update: tf.Tensor, weights: tf.Variable | tf.Tensor) -> tf.Tensor:
        of_weights, of_update = tf.norm(weights), tf.norm(update)
        both = tf.logical_and(of_weights > 0, of_update > 0)
        # Where the condition picks the other value, this one is not to be infinite.
        ratio = of_weights / tf.where(both, of_update, tf.ones_like(of_update))
        return tf.where(both, ratio, tf.ones_like(ratio)) * update


def _one_minus_power(base: float, steps: tf.Tensor) -> tf.Tensor:
    # Of 1 - 0.999 float32 keeps only four digits.
    return -tf.math.expm1(steps * math.log(base)) if base else tf.ones_like(steps)
