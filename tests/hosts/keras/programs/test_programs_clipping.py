"""Clipping by a global norm that is known already, as optimizers of every Keras clip."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, variable

from tfmp.core.gradients.norms import halves_of_square_sums
from tfmp.hosts.keras.programs.clipping import clipped_by, clips_by_global_norm, true_norm

pytestmark = pytest.mark.essential


@for_every_keras()
@pytest.mark.parametrize(
    ("settings", "clips"),
    [({}, False), ({"clipnorm": 1.0}, False), ({"clipvalue": 1.0}, False), ({"global_clipnorm": 1.0}, True)],
)
def test_optimizer_clips_by_global_norm_if_that_is_its_setting(
    keras: ModuleType, settings: dict[str, Any], clips: bool
) -> None:
    assert clips_by_global_norm(optimizer(keras, **settings)) is clips


@for_every_keras("keras3")
def test_optimizer_that_accumulates_clips_the_sums_of_a_window(keras: ModuleType) -> None:
    assert not clips_by_global_norm(optimizer(keras, global_clipnorm=1.0, gradient_accumulation_steps=2))


@for_every_keras()
@pytest.mark.parametrize("norm", [2.5, 10.0])
def test_gradients_are_clipped_as_the_optimizer_clips_them(keras: ModuleType, norm: float) -> None:
    opt, kernel = optimizer(keras, learning_rate=1.0, global_clipnorm=norm), variable(keras, [0.0, 0.0])
    scaled, loss_scale = [tf.constant([24.0, 32.0])], tf.constant(8.0)
    of_step = true_norm(scaled, halves_of_square_sums(scaled), loss_scale)
    assert float(of_step) == 5
    (grad, none) = clipped_by(of_step, [tf.constant([3.0, 4.0]), None], opt)
    assert none is None
    opt.apply_gradients([(tf.constant([3.0, 4.0]), kernel)])
    np.testing.assert_allclose(-grad.numpy(), kernel.numpy(), rtol=1e-6)
