"""Skips steps whose gradient norm is an outlier: a stand-in until `tfmp.SpikeDetector` exists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

import tfmp

WINDOW = 128
DEVIATIONS = 6
SPIKES_IN_A_ROW = 10


class SpikeSkippingOptimizer(tfmp.optimizers.LossScaleOptimizerKeras3):
    """A `tfmp.LossScaleOptimizer` that skips steps whose gradients are finite, but far larger than usual.

    The rule, where `norm` is the global norm of the unscaled gradients, before clipping:

        bound = mean(window) + 6 * deviation(window)    if the window holds 128 norms, otherwise infinite
        norm <= bound:     apply the step, put `norm` into the window, spikes = 0
        norm > bound:      skip the step, spikes += 1; but apply it if there were 10 spikes in a row before it
        norm not finite:   the loss scaling skips the step

    Args:
        inner_optimizer: The optimizer.
        manager: The loss-scale manager.
        skips: Whether spikes are skipped; False only records the norms.

    Attributes:
        norm: The norm of the last step.
        bound: The bound that this norm was compared with.
        last_step_spiked: Whether the last step was skipped as a spike.
    """

    def __init__(
        self, inner_optimizer: keras.optimizers.Optimizer, manager: tfmp.LossScaleManager, *, skips: bool
    ) -> None:
        super().__init__(inner_optimizer, manager)
        self._skips = skips
        self._window = tf.Variable(tf.zeros([WINDOW], tf.float64), trainable=False)
        self._seen = tf.Variable(0, trainable=False)
        self._spikes = tf.Variable(0, trainable=False)
        self.norm = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self.bound = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self.last_step_spiked = tf.Variable(False, trainable=False)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        """Apply the gradients, unless they are a spike or overflowed."""
        unscaled = self.get_unscaled_gradients(list(grads))
        _, norm = tfmp.clip_by_global_norm(unscaled, 1.0)

        def applied() -> tf.Tensor:
            super(SpikeSkippingOptimizer, self).apply(unscaled, trainable_variables)
            return tf.constant(True)

        tf.cond(self._is_skipped(norm), lambda: tf.constant(False), applied)

    def _is_skipped(self, norm: tf.Tensor) -> tf.Tensor:
        bound = tf.reduce_mean(self._window) + DEVIATIONS * tf.math.reduce_std(self._window)
        bound = tf.where(self._seen >= WINDOW, bound, tf.constant(float("inf"), tf.float64))
        finite = tf.math.is_finite(norm)
        spike = tf.logical_and(finite, norm > bound)
        usual = tf.logical_and(finite, norm <= bound)
        skipped = tf.logical_and(spike, self._spikes < SPIKES_IN_A_ROW) if self._skips else tf.constant(False)
        place = tf.one_hot(self._seen % WINDOW, WINDOW, on_value=usual, off_value=False, dtype=tf.bool)
        self._window.assign(tf.where(place, norm, self._window))
        self._seen.assign_add(tf.cast(usual, tf.int32))
        self._spikes.assign(tf.where(usual, 0, self._spikes + tf.cast(spike, tf.int32)))
        self.norm.assign(norm)
        self.bound.assign(bound)
        self.last_step_spiked.assign(skipped)
        return skipped
