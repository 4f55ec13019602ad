"""Training in float8, as Keras 3 does it, with the loss scaled: the scales of float8 follow the loss scale."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kerases import values

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

#: The largest number of float8_e5m2, the type of gradients.
_LARGEST = 57344.0


class _Float8Training:
    """A layer in float8, and the largest gradient of each step beside the largest one that its scale allows for."""

    def __init__(self, manager: tfmp.LossScaleManager) -> None:
        keras.utils.set_random_seed(0)
        self.layer = keras.layers.Dense(4, dtype="mixed_float16")
        self.layer.build([None, 8])
        self.layer.quantize("float8")
        self.variables = self.layer.trainable_variables
        self.opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), manager)
        self.opt.build(self.variables)
        self.inputs = np.random.default_rng(0).normal(size=[16, 8]).astype(np.float32)
        self.step = tf.function(self._step)

    def _step(self, factor: tf.Tensor) -> None:
        self.opt.apply(self.gradients(lambda loss: self.opt.scale_loss(factor * loss)), self.variables)

    def gradients(self, scaled: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        """Return the gradients of a loss that a function scales."""
        with tf.GradientTape() as tape:
            outputs = self.layer(self.inputs, training=True)
            loss = scaled(tf.reduce_mean(tf.cast(outputs, tf.float32)))
        return tape.gradient(loss, [variable.value for variable in self.variables])

    def scales(self) -> list[Any]:
        """Return what float8 keeps: scales, and histories of largest magnitudes."""
        return values([variable for variable in self.variables if variable.overwrite_with_gradient])

    def saturated(self) -> bool:
        """Take a step, and return whether gradients were larger than the scale before it allows for."""
        allowed, loss_scale = _LARGEST * float(self.layer.outputs_grad_scale.numpy()), float(self.opt.loss_scale)
        self.step(tf.constant(1.0))
        # After the step the history is in terms of the next loss scale.
        largest = float(self.layer.outputs_grad_amax_history.numpy()[0]) * loss_scale / float(self.opt.loss_scale)
        # The scale itself is rounded.
        return largest > 1.001 * allowed


def test_doubled_scale_saturates_no_step() -> None:
    training = _Float8Training(tfmp.ExponentialUpdateLossScaleManager(2.0**8, 10))
    saturated = [training.saturated() for _ in range(45)]
    assert float(training.opt.loss_scale) == 2.0**12
    # Keras learns the size of gradients from the first two steps.
    assert not any(saturated[2:])
    # A history that did not follow would be too small in two steps.
    allowed = _LARGEST * float(training.layer.outputs_grad_scale.numpy())
    assert allowed == pytest.approx(2.0**12 / 64, rel=1e-3)


def test_skipped_step_leaves_the_scales_of_float8_and_a_halved_scale_saturates_no_step() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(2.0**12, 1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    training = _Float8Training(manager)
    for _ in range(3):
        training.saturated()
    for skipped in range(1, 9):
        before = training.scales()
        training.step(tf.constant(np.inf))
        # When the loss scale is halved, the histories are.
        assert skipped % 2 == 0 or training.scales() == before
        assert int(training.opt.skipped_steps) == skipped
        assert skipped % 2 or not training.saturated()
    assert max(before[-1]) > 0
    assert float(training.opt.loss_scale) == 2.0**8


def test_next_values_of_scales_that_were_divided_by_the_loss_scale_are_refused() -> None:
    training = _Float8Training(tfmp.FixedLossScaleManager(8.0))
    opt = training.opt

    @tf.function
    def step() -> None:
        opt.apply(opt.get_unscaled_gradients(training.gradients(opt.get_scaled_loss)), training.variables)

    before = training.layer.get_weights()
    with pytest.raises(ValueError, match=r"the gradients of dense.*/inputs_scale, .* are the next values"):
        step()
    for weight, other in zip(training.layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, other)
