"""The LAMB optimizer, with which BERT is trained in large batches."""

import math
from collections.abc import Iterable

import tensorflow as tf

from tfmp.bert.optimizers import AdamWeightDecayOptimizer
from tfmp.types import GradsAndVars


class LAMBOptimizer(AdamWeightDecayOptimizer):
    """Adam with decoupled weight decay, where each variable's update is as long as its weights times the learning rate.

    LAMB trains with very large batches. For each variable `w` with gradient `g`, at step `t`, counted from 1:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        update = (m / (1 - beta_1 ** t)) / (sqrt(v / (1 - beta_2 ** t)) + epsilon) + weight_decay_rate * w
        w -= learning_rate * norm(w) / norm(update) * update

    If one of the norms is 0, their ratio counts as 1. `t` is the global step plus 1, so `apply_gradients` needs the
    global step. The optimizer then has no variables besides the moments, and checkpoints of NVIDIA's optimizer restore.
    NVIDIA's optimizer uses the global step without adding 1, so the first update of a training is 0 / 0 there.

    In all other respects, such as the arguments and the float32 copies of half-precision variables, the class is like
    `AdamWeightDecayOptimizer`.

    Examples:
        >>> w, global_step = tf.Variable([3.0, 4.0]), tf.Variable(0, dtype=tf.int64)
        >>> LAMBOptimizer(0.5).apply_gradients([(tf.constant([1.0, 1.0]), w)], global_step)
        >>> [round(value, 3) for value in w.numpy().tolist()], int(global_step)
        ([1.232, 2.232], 1)

    Source: "Large Batch Optimization for Deep Learning" (https://arxiv.org/abs/1904.00962); NVIDIA's
    DeepLearningExamples.
    """

    # Valid within one call of `apply_gradients`. TensorFlow's own optimizers keep such values as attributes too.
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

        The arguments are those of `AdamWeightDecayOptimizer.apply_gradients`, but `global_step` must be given.

        Raises:
            TypeError: `grads_and_vars` does not consist of pairs of a gradient and its variable.
            ValueError: `global_step` is None, or all gradients are None.
        """
        if global_step is None:
            raise ValueError(
                "LAMBOptimizer corrects its moments by the global step: pass global_step to apply_gradients or "
                "minimize, tf.compat.v1.train.get_or_create_global_step() in a graph."
            )
        self._global_step = global_step
        return super().apply_gradients(grads_and_vars, global_step, name, manual_fp16)

    def _prepare(self) -> None:
        # TensorFlow calls this once before it updates the variables, so every update uses the same step number, read
        # before the global step is incremented.
        steps = tf.cast(tf.convert_to_tensor(self._global_step), tf.float32) + 1
        self._corrections = _one_minus_power(self.beta_1, steps), _one_minus_power(self.beta_2, steps)

    def _direction(self, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        of_first, of_second = (tf.cast(correction, first.dtype) for correction in self._corrections)
        return super()._direction(first / of_first, second / of_second)

    def _scaled(self, update: tf.Tensor, weights: tf.Variable | tf.Tensor) -> tf.Tensor:
        of_weights, of_update = tf.norm(weights), tf.norm(update)
        both = tf.logical_and(of_weights > 0, of_update > 0)
        # tf.where evaluates both of its values, so the one that is not used must not divide by 0.
        ratio = of_weights / tf.where(both, of_update, tf.ones_like(of_update))
        return tf.where(both, ratio, tf.ones_like(ratio)) * update


def _one_minus_power(base: float, steps: tf.Tensor) -> tf.Tensor:
    # Accurate where base ** steps is near 1: in float32, 1 - 0.999 has only four correct digits.
    return -tf.math.expm1(steps * math.log(base)) if base else tf.ones_like(steps)
