import math

import pytest
import tensorflow as tf
from function_steps import take_step

import tfmp
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Gradients


def _scaler(detector: tfmp.NonFiniteDetector | tfmp.SaturationDetector | None = None) -> tuple:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 100, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return LossScaler(manager, detector or tfmp.NonFiniteDetector(), is_distributed=False), manager


def test_scale_and_unscale_use_the_current_scale() -> None:
    scaler, manager = _scaler()
    manager.update_loss_scale(tf.constant(False))
    assert float(scaler.scale(tf.constant(3.0))) == 12
    assert float(scaler.unscale([tf.constant(12.0)])[0]) == 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_step_applies_finite_gradients_and_skips_others(compiled: bool, bad: float) -> None:
    scaler, manager = _scaler()
    weight = tf.Variable(0.0)

    def apply(grads: Gradients) -> tf.Operation:
        return tf.group(weight.assign_add(grads[0]))

    def step(grad: tf.Tensor) -> None:
        take_step(scaler, [grad, None], ["kernel", "bias"], apply)

    run = tf.function(step) if compiled else step
    for grad in [1.0, bad, 2.0]:
        run(tf.constant(grad))
    assert float(weight) == 3
    assert float(manager.get_loss_scale()) == 4


def test_detector_decides_what_is_skipped() -> None:
    scaler, manager = _scaler(tfmp.SaturationDetector())
    take_step(
        scaler, [tf.constant(65504.0 / 8)], ["kernel"], lambda grads: pytest.fail("a saturated gradient was applied")
    )
    assert float(manager.get_loss_scale()) == 4
