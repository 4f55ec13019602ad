"""Models of keras-hub train in little memory: with recomputation, half-precision state and LoRA."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_hub_models import (
    MARKS,
    MODELS,
    SCALE,
    STEPS,
    adam,
    batches,
    compiled,
    difference,
    losses_in_float32,
    make,
    prepare,
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


_models = pytest.mark.parametrize("model", ["GPT2CausalLM", "GemmaCausalLM"])

_RANK = 4


def _with_lora(model: str, optimizer: Any, level: str = "O2", *, seed: int = 2, dropout: float = 0.0) -> Any:
    task = make(model, seed=seed, dropout=dropout)
    task.backbone.enable_lora(_RANK)
    prepare(task, model, optimizer, level)
    return task


def _frozen(task: Any) -> list[np.ndarray]:
    seeds = {id(variable) for variable in task.non_trainable_variables} - {id(each) for each in task.weights}
    return [variable.numpy() for variable in task.non_trainable_variables if id(variable) not in seeds]


@_models
@pytest.mark.feature("LoRA")
def test_lora_trains_in_little_memory_as_in_float32(model: str) -> None:
    in_float32 = train(_with_lora(model, adam(model), "O0"), model, STEPS)
    half = tfmp.half_state(adam(model))
    task = _with_lora(model, scaled(half))
    before = _frozen(task)
    recomputed = tfmp.recompute_layers(task, MODELS[model].blocks)
    losses = train(recomputed, model, STEPS)
    assert difference(losses, in_float32) < 2e-2
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    # Keras also trains the biases of these layers.
    assert {variable.name for variable in recomputed.trainable_variables} - {"bias"} == {
        "lora_kernel_a",
        "lora_kernel_b",
    }
    assert half.state_bytes().float32_bytes == 8 * sum(each.numpy().size for each in task.trainable_variables)
    for found, expected in zip(_frozen(task), before, strict=True):
        np.testing.assert_array_equal(found, expected)


@_models
@pytest.mark.feature("LoRA")
def test_overflow_leaves_lora_unchanged(model: str) -> None:
    task = _with_lora(model, scaled(adam(model)), dropout=0.1)
    recomputed = tfmp.recompute_layers(task, MODELS[model].blocks)
    opt = recomputed.optimizer
    x, y = batches(model)[0]
    good, bad = np.ones(y.shape, np.float32), np.ones(y.shape, np.float32)
    bad[2] = np.inf
    recomputed.train_on_batch(x, y, sample_weight=good)
    before = [variable.numpy() for variable in [*task.variables, *opt.inner_optimizer.variables]]
    seeds = {id(variable) for variable in task.variables} - {id(each) for each in task.weights}
    recomputed.train_on_batch(x, y, sample_weight=bad)
    for variable, expected in zip([*task.variables, *opt.inner_optimizer.variables], before, strict=True):
        if id(variable) not in seeds:
            np.testing.assert_array_equal(variable.numpy(), expected)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (1, 1, SCALE / 2)


@_models
@pytest.mark.feature("LoRA")
def test_lora_weights_move_to_another_model(model: str, tmp_path: Path) -> None:
    task = _with_lora(model, scaled(adam(model)))
    recomputed = tfmp.recompute_layers(task, MODELS[model].blocks)
    train(recomputed, model, 3)
    recomputed.backbone.save_lora_weights(tmp_path / "adapter.lora.h5")
    x, _ = batches(model)[0]
    other = make(model)
    untrained = other.predict(x, verbose=0)
    other.backbone.load_lora_weights(tmp_path / "adapter.lora.h5")
    # The file does not hold the biases, which are trained, too.
    for new, old in zip(other.trainable_variables, task.trainable_variables, strict=True):
        if new.name == "bias":
            new.assign(old)
    tfmp.set_precision(other, "O2")
    found, expected = other.predict(x, verbose=0), task.predict(x, verbose=0)
    np.testing.assert_array_equal(found, expected)
    assert np.max(np.abs(found - untrained)) > 1e-2
