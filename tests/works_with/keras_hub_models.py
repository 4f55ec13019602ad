"""Small models of keras-hub, made from configurations, with what they learn in the tests."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import suite
import tensorflow as tf

import tfmp

keras_hub = pytest.importorskip(
    "keras_hub", reason="needs keras-hub, which the tox environment works_with_keras3 installs"
)

#: What all batches have: rows, positions, and how many tokens, classes and frames there are.
ROWS, LENGTH, TOKENS, CLASSES, MELS = 8, 12, 40, 3, 8

Batch = tuple[Any, np.ndarray]

_TEXT: dict[str, Any] = {"vocabulary_size": TOKENS, "num_layers": 2, "num_heads": 2, "dropout": 0.0}
_TEXT |= {"hidden_dim": 16, "intermediate_dim": 32}


def _tokens(rng: np.random.Generator, name: str = "") -> dict[str, np.ndarray]:
    """Draw sequences, the last of which are padded."""
    padding_mask = np.ones([ROWS, LENGTH], np.int32)
    padding_mask[ROWS // 2 :, LENGTH - 3 :] = 0
    token_ids = rng.integers(1, TOKENS, [ROWS, LENGTH]).astype(np.int32) * padding_mask
    return {f"{name}token_ids": token_ids, f"{name}padding_mask": padding_mask}


def _classes_of_tokens(rng: np.random.Generator) -> Batch:
    x = _tokens(rng)
    return x, x["token_ids"][:, 1] % CLASSES


def _with_segments(x: Any, y: Any = None) -> Batch:
    segment_ids = np.zeros([ROWS, LENGTH], np.int32)
    segment_ids[:, LENGTH // 2 :] = 1
    return {**x, "segment_ids": segment_ids}, y


def _masked_tokens(rng: np.random.Generator) -> Batch:
    x, _ = _with_segments(_tokens(rng))
    positions = np.stack([rng.choice(LENGTH - 3, 3, replace=False) for _ in range(ROWS)]).astype(np.int32)
    y = np.take_along_axis(x["token_ids"], positions, 1)
    np.put_along_axis(x["token_ids"], positions, 0, 1)
    return {**x, "mask_positions": positions}, y


def _next_tokens(rng: np.random.Generator) -> Batch:
    x = _tokens(rng)
    return x, np.roll(x["token_ids"], -1, 1)


def _translations(rng: np.random.Generator) -> Batch:
    encoder, decoder = _tokens(rng, "encoder_"), _tokens(rng, "decoder_")
    return {**encoder, **decoder}, encoder["encoder_token_ids"]


def _transcripts(rng: np.random.Generator) -> Batch:
    x = _tokens(rng, "decoder_")
    features = rng.normal(size=[ROWS, 2 * LENGTH, MELS]).astype(np.float32)
    return {**x, "encoder_features": features}, np.roll(x["decoder_token_ids"], -1, 1)


def _images(rng: np.random.Generator) -> Batch:
    classes = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    images = rng.normal(size=[ROWS, 32, 32, 3]).astype(np.float32)
    images[np.arange(ROWS), :, :, classes] += 0.5
    return images, classes


def _albert() -> Any:
    sizes = {"embedding_dim": 8, "num_inner_repetitions": 2, "max_sequence_length": LENGTH}
    return keras_hub.models.AlbertTextClassifier(
        keras_hub.models.AlbertBackbone(**_TEXT, **sizes), CLASSES, dropout=0.0
    )


def _bert() -> Any:
    return keras_hub.models.BertMaskedLM(keras_hub.models.BertBackbone(**_TEXT, max_sequence_length=LENGTH))


def _deberta() -> Any:
    backbone = keras_hub.models.DebertaV3Backbone(**_TEXT, max_sequence_length=LENGTH, bucket_size=4)
    return keras_hub.models.DebertaV3TextClassifier(backbone, CLASSES, dropout=0.0)


def _gpt2() -> Any:
    return keras_hub.models.GPT2CausalLM(keras_hub.models.GPT2Backbone(**_TEXT, max_sequence_length=LENGTH))


def _gemma() -> Any:
    sizes = {**_TEXT, "num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    del sizes["num_heads"]
    return keras_hub.models.GemmaCausalLM(keras_hub.models.GemmaBackbone(**sizes))


def _with_logits(backbone: Any) -> Any:
    logits = keras.layers.Dense(TOKENS, name="logits")
    return keras.Model(backbone.input, logits(backbone(backbone.input)["decoder_sequence_output"]))


def _whisper() -> Any:
    lengths = {"max_encoder_sequence_length": 2 * LENGTH, "max_decoder_sequence_length": LENGTH}
    return _with_logits(keras_hub.models.WhisperBackbone(**_TEXT, num_mels=MELS, **lengths))


def _vit() -> Any:
    backbone = keras_hub.models.ViTBackbone((32, 32, 3), 8, 2, 2, 16, 32, 0.0, 0.0)
    return keras_hub.models.ViTImageClassifier(backbone, CLASSES, dropout=0.0)


def _resnet() -> Any:
    shape = {"image_shape": (32, 32, 3)}
    backbone = keras_hub.models.ResNetBackbone([64], [3], [64, 64], [1, 1], [1, 2], "basic_block", **shape)
    return keras_hub.models.ResNetImageClassifier(backbone, CLASSES, dropout=0.0)


def _loss(model: Any, batch: Batch) -> tf.Tensor:
    """Return the loss of a loop of the user's own."""
    x, y = batch
    # A mean by Keras' loss is divided by the number of replicas, as the loop does itself.
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    return tf.reduce_mean(loss_fn(y, model(x, training=True))) + sum(model.losses)


def _subject(
    make: Callable[[], Any],
    draw: Callable[[np.random.Generator], Batch],
    blocks: str,
    *,
    learning_rate: float = 1e-2,
    has_loss: bool = True,
    trains_on_replicas: bool = False,
    **settings: Any,
) -> suite.Subject:
    """Return a model with the paths of the layers that are recomputed; a task of keras-hub chooses its loss itself."""
    rng, in_float16 = np.random.default_rng(5), {"tolerance": 6e-3, "falls": 1.0}
    compile_with = {} if has_loss else {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    def optimizer() -> Any:
        return keras.optimizers.Adam(learning_rate)

    def build() -> Any:
        model = make()
        model.compile(suite.scaled(optimizer()), **compile_with)
        return model

    return suite.Subject(
        keras=keras,
        build=build,
        optimizer=optimizer,
        batches=suite.four_in_turn(lambda: tf.nest.map_structure(tf.constant, draw(rng))),
        loss=_loss,
        compile_with=compile_with,
        recomputed=lambda model: tfmp.recompute_layers(model, blocks),
        on_replicas=lambda: keras.optimizers.SGD(learning_rate, momentum=0.9),
        lacks=frozenset() if trains_on_replicas else frozenset({"two replicas"}),
        **in_float16 | settings,
    )


def _callbacks(directory: Path) -> list[Any]:
    return [
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.ModelCheckpoint(
            directory / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.BackupAndRestore(directory / "backup"),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.TensorBoard(directory / "logs"),
    ]


#: Recomputed gradients of these models were found to differ by less than 1e-8; those of the others in no bit.
_ROUNDS = (1e-4, 1e-6)

#: The tolerances are about three times what was measured. The losses of images fall to a hundredth, and the same error
#: is a larger share of them.
#:
#: By the names of their classes, which are the rows of the table.
_SUBJECTS: dict[str, Callable[[], suite.Subject]] = {
    "AlbertTextClassifier": lambda: _subject(
        _albert,
        lambda rng: _with_segments(*_classes_of_tokens(rng)),
        r".*/group_\d+_inner_layer_\d+",
        trains_on_replicas=True,
    ),
    # The head adds its bias, a variable, to a tensor. In eager code, in which the check runs, Keras casts the variable
    # only in the left operand.
    "BertMaskedLM": lambda: _subject(
        _bert, _masked_tokens, r".*/transformer_layer_\d+", check_keeps=["mlm_head"], callbacks=_callbacks
    ),
    "DebertaV3TextClassifier": lambda: _subject(
        _deberta, _classes_of_tokens, r".*/disentangled_attention_encoder_layer_\d+", rounding=_ROUNDS
    ),
    "GPT2CausalLM": lambda: _subject(_gpt2, _next_tokens, r".*/transformer_layer_\d+", trains_on_replicas=True),
    "GemmaCausalLM": lambda: _subject(_gemma, _next_tokens, r".*/decoder_block_\d+"),
    "T5Backbone": lambda: _subject(
        lambda: _with_logits(keras_hub.models.T5Backbone(**_TEXT)),
        _translations,
        r".*/transformer_(en|de)coder_layer_\d+",
        has_loss=False,
        # Their masks are products with -1e9, which is infinite in float16, and 0 times infinity is NaN.
        keep_float32=[r".*/(self|cross)_attention"],
        float32=frozenset({"query_projector", "key_projector", "value_projector", "output_projector"}),
        check_keeps=None,
        rounding=_ROUNDS,
    ),
    "WhisperBackbone": lambda: _subject(
        _whisper, _transcripts, r".*/transformer_(en|de)coder_layer_\d+", has_loss=False, rounding=_ROUNDS
    ),
    "ViTImageClassifier": lambda: _subject(
        _vit, _images, r".*/vit_encoder", learning_rate=1e-3, tolerance=2e-2, trains_on_replicas=True
    ),
    "ResNetImageClassifier": lambda: _subject(
        _resnet, _images, r".*/stack\d+_block\d+_\d_conv", learning_rate=1e-3, tolerance=6e-2, callbacks=_callbacks
    ),
}

MODELS: Sequence[str] = tuple(_SUBJECTS)


@functools.cache
def subject_of(model: str) -> suite.Subject:
    """Return a model by its name."""
    return _SUBJECTS[model]()


def prepared(model: Any, subject: suite.Subject, optimizer: Any = None) -> Any:
    """Compile a model, set its level as a user does, and make the slots; return it."""
    model.compile(suite.scaled(optimizer or subject.optimizer()), **subject.compile_with)
    tfmp.set_precision(model, "O2", keep_float32=subject.keep_float32)
    model.optimizer.build(model.trainable_variables)
    return model
