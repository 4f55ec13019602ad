"""Hugging Face's TensorFlow models, with `create_optimizer`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import suite
import tensorflow as tf

import tfmp

transformers, tf_keras = suite.library("transformers"), suite.library("tf_keras")
modeling = suite.library("transformers.modeling_tf_utils")


# transformers still calls functions that NumPy and Keras have deprecated.
pytestmark = [pytest.mark.works_with("Hugging Face transformers"), pytest.mark.filterwarnings("default")]

_ROWS, _LENGTH, _WORDS, _CLASSES = 8, 10, 50, 4

#: What the models have in common, by the names that most configurations have.
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

#: What of T5 float16 does not suit: `shared`, the embedding, has the type of the masks, whose -1e9 is infinite in
#: float16; attention adds these masks; the normalization squares hidden states, of which 256 is too large already.
_T5_KEEPS = ("shared", ".*Attention", ".*layer_norm")


def _bert() -> Any:
    return transformers.TFBertForSequenceClassification(
        transformers.BertConfig(vocab_size=_WORDS, num_labels=_CLASSES, **_SIZES, **_NO_DROPOUT)
    )


def _gpt2() -> Any:
    sizes = {"vocab_size": _WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.TFGPT2LMHeadModel(config)


def _vit() -> Any:
    return transformers.TFViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=_CLASSES, **_SIZES, **_NO_DROPOUT)
    )


def _t5() -> Any:
    sizes = {"vocab_size": _WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.TFT5ForConditionalGeneration(config)


_MAKES: dict[str, Callable[[], Any]] = {"bert": _bert, "gpt2": _gpt2, "vit": _vit, "t5": _t5}


def _batch(model: str, rng: np.random.Generator) -> dict[str, tf.Tensor]:
    """Return inputs, which have the labels."""
    words = rng.integers(1, _WORDS, (_ROWS, _LENGTH))
    mask = np.ones_like(words)
    mask[:2, 7:] = 0
    classes = rng.integers(0, _CLASSES, _ROWS)
    labels = {"bert": classes, "vit": classes, "gpt2": words, "t5": words[:, :6]}[model]
    if model == "vit":
        images = rng.normal(size=(_ROWS, 3, 16, 16))
        return {"pixel_values": tf.constant(images, tf.float32), "labels": tf.constant(labels, tf.int32)}
    arrays = {"input_ids": words, "attention_mask": mask, "labels": labels}
    return {name: tf.constant(values, tf.int32) for name, values in arrays.items()}


def _loss(model: Any, batch: Any) -> tf.Tensor:
    # The loss of a classifier has the type of its logits.
    return tf.reduce_mean(tf.cast(model(batch[0], training=True).loss, tf.float32))


def _callbacks(batch: Any, directory: Path) -> list[Any]:
    def accuracy(predictions: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.argmax(predictions[0], -1) == predictions[1]))}

    data = tf.data.Dataset.from_tensor_slices(batch[0]).batch(_ROWS)
    return [
        transformers.KerasMetricCallback(accuracy, data, label_cols=["labels"]),
        tf_keras.callbacks.EarlyStopping("loss", patience=1),
        tf_keras.callbacks.ModelCheckpoint(directory / "weights", save_weights_only=True),
    ]


_LACKS = {
    "bert": frozenset[str](),
    "t5": frozenset({"two replicas"}),
    "gpt2": frozenset({"two replicas", "resume"}),
    "vit": frozenset({"two replicas", "resume"}),
}


#: Where the models have their blocks, and under which name.
_BLOCKS: dict[str, Callable[[Any], list[tuple[Any, str]]]] = {
    "bert": lambda model: [(model.bert.encoder, "layer")],
    "gpt2": lambda model: [(model.transformer, "h")],
    "vit": lambda model: [(model.vit.encoder, "layer")],
    "t5": lambda model: [(model.encoder, "block"), (model.decoder, "block")],
}


def _recomputed(name: str, inputs: Any, plain: Any) -> Any:
    """Return a model with the weights of a plain one, whose blocks were wrapped before its first call."""
    recomputed = _MAKES[name]()
    for holder, blocks in _BLOCKS[name](recomputed):
        setattr(holder, blocks, [tfmp.Recompute(block) for block in getattr(holder, blocks)])
    recomputed(inputs)
    values = {suite.name_of(weight): weight for weight in plain.weights}
    for weight in recomputed.weights:
        weight.assign(values[suite.name_of(weight)])
    return recomputed


@functools.cache
def _subject_of(model: str) -> suite.Subject:
    rng, is_t5 = np.random.default_rng(0), model == "t5"
    batches = suite.four_in_turn(lambda: (_batch(model, rng),))

    def build() -> Any:
        made = _MAKES[model]()
        made(batches[0][0])
        return made

    return suite.Subject(
        keras=tf_keras,
        build=build,
        optimizer=lambda: transformers.create_optimizer(1e-2, 2 * suite.STEPS, 2, weight_decay_rate=0.01)[0],
        batches=batches,
        loss=_loss,
        compile_with={},
        keep_float32=_T5_KEEPS if is_t5 else [],
        float32=frozenset("qkvo" if is_t5 else ""),
        # GPT-2 has no other ones.
        dense=[modeling.TFConv1D],
        tolerance=5e-3 if is_t5 else 2e-3,
        check=(lambda _, outputs: outputs.loss, [(inputs, inputs["labels"]) for (inputs,) in batches[:2]]),
        recomputed=functools.partial(_recomputed, model, batches[0][0]),
        # Gradients of a variable that several layers use, such as T5's embedding, are summed in another order.
        rounding=(1e-5, 1e-6),
        callbacks=functools.partial(_callbacks, batches[0]) if model == "bert" else None,
        lacks=_LACKS[model],
    )


class TestTransformers(suite.Suite):
    models, subject = tuple(_MAKES), staticmethod(_subject_of)
