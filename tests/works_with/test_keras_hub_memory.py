"""Models of keras-hub train in little memory: with recomputation, half-precision state and LoRA."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_hub_models import (
    MARKS,
    MODELS,
    STEPS,
    adam,
    batches,
    compiled,
    difference,
    losses_in_float32,
    make,
    scaled,
    train,
)

import tfmp

pytestmark = MARKS

#: The relative difference of gradients between graphs that round in other places; other models' are equal in every bit.
_ROUNDING = {"WhisperBackbone": 1e-2}

_all_models = pytest.mark.parametrize("model", MODELS)


@_all_models
@pytest.mark.feature("recompute")
@pytest.mark.usefixtures("same_rounding")
def test_recomputed_layers_have_the_same_gradients(model: str) -> None:
    plain = make(model, dropout=0.1)
    tfmp.set_precision(plain, "O2", keep_float32=MODELS[model].keep_float32)
    recomputed = tfmp.recompute_layers(plain, MODELS[model].blocks)
    assert isinstance(recomputed, type(plain))
    assert any(isinstance(layer, tfmp.Recompute) for layer in recomputed._flatten_layers())
    state = [variable.numpy() for variable in plain.non_trainable_variables]
    found = []
    for each in (plain, recomputed):
        for variable, value in zip(plain.non_trainable_variables, state, strict=True):
            variable.assign(value)
        found.append(_gradients(each, model))
    (loss, grads, moved), (recomputed_loss, recomputed_grads, recomputed_moved) = found
    assert recomputed_loss == loss
    for one, other in zip([*recomputed_grads, *recomputed_moved], [*grads, *moved], strict=True):
        error = np.linalg.norm((one - other).ravel().astype(np.float64))
        assert error <= _ROUNDING.get(model, 0.0) * np.linalg.norm(other.ravel().astype(np.float64))


def _gradients(trained: Any, model: str) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
    """Return the loss, the gradients of a scaled step, and what became of the moving statistics and the seeds."""
    x, y = batches(model)[0]
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, trained(x, training=True)) + sum(trained.losses)
            scaled_loss = loss * 1024.0
        variables = [variable.value for variable in trained.trainable_variables]
        grads = tape.gradient(scaled_loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, [tf.convert_to_tensor(grad) for grad in grads]

    loss, grads = step()
    state = [variable.numpy() for variable in trained.non_trainable_variables]
    return float(loss), [grad.numpy() for grad in grads], state


@pytest.mark.parametrize("model", ["GPT2CausalLM", "GemmaCausalLM"])
@pytest.mark.feature("recompute")
def test_recomputed_model_generates_as_the_plain_one(model: str) -> None:
    plain = compiled(model, scaled(adam(model)))
    recomputed = tfmp.recompute_layers(plain, MODELS[model].blocks)
    losses = train(recomputed, model, STEPS)
    assert difference(losses, losses_in_float32(model)) < MODELS[model].tolerance
    x, _ = batches(model)[0]
    padding_mask = np.zeros_like(x["padding_mask"])
    padding_mask[:, :4] = 1
    found = []
    for each in (plain, recomputed):
        each.compile(scaled(adam(model)), sampler="greedy")
        found.append(each.generate({**x, "padding_mask": padding_mask}, stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[0][:, :4], x["token_ids"][:, :4])


@_all_models
@pytest.mark.feature("half state")
def test_state_in_half_precision_trains(model: str) -> None:
    half = tfmp.half_state(adam(model))
    losses = train(compiled(model, scaled(half)), model, STEPS)
    assert half.state_bytes().bytes * 2 == half.state_bytes().float32_bytes
    assert difference(losses, losses_in_float32(model)) < MODELS[model].tolerance
