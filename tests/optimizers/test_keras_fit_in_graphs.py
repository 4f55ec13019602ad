"""`fit` of Keras 2 where eager execution is off: Keras builds one graph, and initializes variables in its session."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import fit_linear, for_every_keras, linear_model

import tfmp

pytestmark = [pytest.mark.essential, pytest.mark.graph, pytest.mark.usefixtures("session")]

for_every_keras2 = for_every_keras("keras2", "tf_keras")


class _Halving(tfmp.LossScaleManager):
    """A manager that a user wrote."""

    def __init__(self) -> None:
        self._scale = tf.Variable(1024.0, trainable=False)

    def get_loss_scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._scale)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        return self._scale.assign(tf.where(finite_grads, self._scale, self._scale / 2)).op


def _manager() -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def _inner(keras: ModuleType, kind: str) -> Any:
    return keras.optimizers.legacy.SGD(0.5) if kind == "legacy" else tf.compat.v1.train.GradientDescentOptimizer(0.5)


def _weight(model: Any) -> float:
    return float(model.get_weights()[0].item())


@pytest.mark.parametrize("kind", ["legacy", "tf1"])
@pytest.mark.parametrize("make_manager", [_manager, _Halving])
@for_every_keras2
def test_fit_initializes_the_loss_scale_and_skips_what_overflows(
    keras: ModuleType, make_manager: Any, kind: str
) -> None:
    opt = tfmp.LossScaleOptimizer(_inner(keras, kind), make_manager())
    model = linear_model(keras, opt)
    fit_linear(model, [1.0, math.inf, -4.0, 1.0])
    assert (_weight(model), keras.backend.get_value(opt.loss_scale)) == (1, 512)


@pytest.mark.parametrize("kind", ["legacy", "tf1"])
@for_every_keras2
def test_fit_initializes_the_sums_of_micro_batches_and_the_norms_of_a_spike_detector(
    keras: ModuleType, kind: str
) -> None:
    settings = {"accumulation_steps": 2, "skip_spikes": tfmp.SpikeDetector(max_norm=100.0)}
    opt = tfmp.LossScaleOptimizer(_inner(keras, kind), _manager(), **settings)
    model = linear_model(keras, opt)
    fit_linear(model, [1.0, 3.0, 500.0, 500.0, -4.0, -2.0])
    assert (_weight(model), keras.backend.get_value(opt.loss_scale)) == (0.5, 1024)


@for_every_keras2
def test_compile_under_a_mixed_policy_does_not_wrap_again(keras: ModuleType) -> None:
    if not tf.compat.v1.resource_variables_enabled():
        pytest.skip("after disable_v2_behavior() Keras refuses a global policy")
    opt = tfmp.LossScaleOptimizer(keras.optimizers.legacy.SGD(0.5), _manager())
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = linear_model(keras, opt)
        fit_linear(model, [1.0, math.inf, -4.0, 1.0])
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert model.optimizer is opt
    assert (_weight(model), keras.backend.get_value(opt.loss_scale)) == (1, 512)


@for_every_keras2
def test_hyperparameters_are_those_of_the_inner_optimizer(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(keras.optimizers.legacy.Adam(0.5), _manager())
    opt.beta_1 = 0.25
    assert np.isclose(keras.backend.get_value(opt.inner_optimizer.beta_1), 0.25)
    assert opt.lr is opt.inner_optimizer.lr
    assert {"beta_1", "lr"} <= set(dir(opt))
