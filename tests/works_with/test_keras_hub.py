"""Models of keras-hub train in float16 as in float32; their files, callbacks, half-precision state and LoRA."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import suite
import tensorflow as tf
from keras_hub_models import MODELS, prepared, subject_of

import tfmp

pytestmark = [
    pytest.mark.works_with("keras-hub"),
    # Keras, of the masks that T5's embedding makes besides those that the model is given; nothing in T5 reads them.
    pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning"),
    # Keras, of BERT's pooler, which a masked language model does not use.
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables ..pooled_dense:UserWarning"),
]

_all_models = pytest.mark.parametrize("model", MODELS)


class TestKerasHub(suite.Suite):
    models, subject = MODELS, staticmethod(subject_of)


#: What multiplies in float32, by the names of ops: Keras does not cast the table of an Embedding, so that logits made
#: by it are float32, and keras-hub not the angles of positions.
_MULTIPLIES_FLOAT32 = {"GemmaCausalLM": "token_embedding|rotary_embedding", "T5Backbone": "(self|cross)_attention"}


@_all_models
@pytest.mark.feature("O1, O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_all_other_products_are_computed_in_float16(model: str, level: str) -> None:
    subject = subject_of(model)
    trained, (x, _) = subject.at(level), subject.batches[0]
    graph = tf.function(lambda x: trained(x, training=True)).get_concrete_function(x).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    products = [node for node in nodes if node.op in {"MatMul", "BatchMatMulV2", "Einsum", "Conv2D"}]
    wide = [node.name for node in products if tf.as_dtype(node.attr["T"].type) != tf.float16]
    kept = _MULTIPLIES_FLOAT32.get(model, "token_embedding")
    assert [name for name in wide if not re.search(kept, name)] == []
    assert len(wide) < len(products)


def _goes_on(subject: suite.Subject, trained: Any) -> tuple[list[float], list[bytes]]:
    losses = [subject.step(trained, batch) for batch in subject.batches[3:6]]
    return losses, [each.numpy().tobytes() for each in [*trained.variables, *trained.optimizer.variables]]


@_all_models
@pytest.mark.feature("resume")
# Keras, of the optimizer that a task makes for itself before it is compiled.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
# TensorFlow and Keras, where T5's masks are made in float16, until its level is set again.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Layer .* looks like it has unbuilt state:UserWarning")
# Keras, of a layer in a model that a layer within another model in it is, too.
@pytest.mark.filterwarnings("ignore:Skipping nested container at '_operations_by_depth:UserWarning")
def test_training_goes_on_from_files_in_every_bit(model: str, tmp_path: Path) -> None:
    # Without Dropout: no file holds the state of its random numbers, with tfmp or without.
    subject = subject_of(model)
    trained = prepared(subject.make(), subject)
    for batch in subject.batches[:3]:
        subject.step(trained, batch)
    trained.save(tmp_path / "model.keras")
    trained.save_weights(tmp_path / "model.weights.h5")
    expected = _goes_on(subject, trained)
    # A task's file does not say what it was compiled with, and a backbone's has one policy for all layers.
    from_file = prepared(keras.saving.load_model(tmp_path / "model.keras", compile=False), subject)
    from_file.load_weights(tmp_path / "model.keras")
    from_weights = prepared(subject.make(), subject)
    from_weights.load_weights(tmp_path / "model.weights.h5")
    for loaded in (from_file, from_weights):
        assert _goes_on(subject, loaded) == expected


@_all_models
@pytest.mark.feature("half state")
def test_state_in_half_precision_trains(model: str) -> None:
    subject = subject_of(model)
    half = tfmp.half_state(subject.optimizer())
    losses = suite.fit(subject, subject.at("O2"), suite.scaled(half))
    assert half.state_bytes().bytes * 2 == half.state_bytes().float32_bytes
    assert suite.farthest(losses, suite.losses(subject, "O0")) < subject.tolerance


_generators = pytest.mark.parametrize("model", ["GPT2CausalLM", "GemmaCausalLM"])


@_generators
@pytest.mark.feature("recompute")
def test_recomputed_model_generates_as_the_plain_one(model: str) -> None:
    subject = subject_of(model)
    plain = subject.at("O2")
    recomputed = subject.recomputed(plain)
    losses = suite.fit(subject, recomputed, suite.scaled(subject.optimizer()))
    assert suite.farthest(losses, suite.losses(subject, "O0")) < subject.tolerance
    x = {name: values.numpy() for name, values in subject.batches[0][0].items()}
    padding_mask = np.zeros_like(x["padding_mask"])
    padding_mask[:, :4] = 1
    found = []
    for each in (plain, recomputed):
        each.compile(suite.scaled(subject.optimizer()), sampler="greedy")
        found.append(each.generate({**x, "padding_mask": padding_mask}, stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[0][:, :4], x["token_ids"][:, :4])


def _with_lora(subject: suite.Subject) -> Any:
    task = subject.make()
    task.backbone.enable_lora(4)
    return task


def _frozen(task: Any) -> list[np.ndarray]:
    return [each.numpy() for each in task.weights if id(each) not in set(map(id, task.trainable_variables))]


@_generators
@pytest.mark.feature("LoRA")
def test_lora_trains_in_little_memory_as_in_float32(model: str) -> None:
    subject = subject_of(model)
    in_float32 = suite.fit(subject, _with_lora(subject), subject.optimizer())
    half = tfmp.half_state(subject.optimizer())
    task = prepared(_with_lora(subject), subject, half)
    before = _frozen(task)
    recomputed = subject.recomputed(task)
    losses = np.array([subject.step(recomputed, batch) for batch in subject.batches])
    assert suite.farthest(losses, in_float32) < 2e-2
    assert suite.learns(losses, 1.0)
    # Keras also trains the biases of these layers.
    names = {variable.name for variable in recomputed.trainable_variables}
    assert names - {"bias"} == {"lora_kernel_a", "lora_kernel_b"}
    assert half.state_bytes().float32_bytes == 8 * sum(each.numpy().size for each in task.trainable_variables)
    suite.assert_equal(_frozen(task), before)


@_generators
@pytest.mark.feature("LoRA")
def test_lora_weights_move_to_another_model(model: str, tmp_path: Path) -> None:
    subject = subject_of(model)
    task, other, (x, _) = prepared(_with_lora(subject), subject), subject.make(), subject.batches[0]
    recomputed = subject.recomputed(task)
    for batch in subject.batches[:3]:
        subject.step(recomputed, batch)
    recomputed.backbone.save_lora_weights(tmp_path / "adapter.lora.h5")
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
