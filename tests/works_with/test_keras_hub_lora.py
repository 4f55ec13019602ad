"""Language models of keras-hub are fine-tuned by LoRA in float16, with recomputation and half-precision state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_hub_models import MARKS, MODELS, SCALE, STEPS, adam, batches, difference, make, prepare, scaled, train

import tfmp

pytestmark = MARKS

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
