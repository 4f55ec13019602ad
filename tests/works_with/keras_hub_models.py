"""Small models of keras-hub, made from configurations, with what they learn in the tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import table
import tensorflow as tf

import tfmp

keras_hub = pytest.importorskip(
    "keras_hub", reason="needs keras-hub, which the tox environment works_with_keras3 installs"
)

LIBRARY = table.Library(
    name="keras-hub",
    distribution="keras-hub",
    beside=["keras", "tensorflow"],
    write='`task.compile(tfmp.LossScaleOptimizer(keras.optimizers.Adam(5e-5)))`, then `tfmp.set_precision(task, "O2")`',
    limits="Compile first: a task compiles itself when it is made, with an optimizer that does not scale the loss, and "
    "`set_precision` would warn of it. T5 is NaN in float16 unless its attention stays in float32: "
    '`keep_float32=[r".*/(self|cross)_attention"]`. Mixtral fails in float16 with a padding mask, as with Keras\' own '
    "policy, because its router multiplies float16 by float32. A `.keras` file of a task does not hold what it was "
    "compiled with: load it with `compile=False`, compile it, set the level, call "
    "`task.optimizer.build(task.trainable_variables)`, and call `load_weights` with the same file. Resuming was tested "
    "without Dropout: neither Keras' files nor `tf.train.Checkpoint` hold the state of its random numbers, with tfmp "
    "or without. `save_lora_weights` leaves out the biases of the layers with LoRA, which are trained as well.",
)

MARKS = [
    pytest.mark.works_with(LIBRARY),
    # Keras, of the masks that T5's embedding makes besides those that the model is given; nothing in T5 reads them.
    pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning"),
    # Keras, of BERT's pooler, which a masked language model does not use.
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables ..pooled_dense:UserWarning"),
    # Keras, where it saves weights, with NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

#: What all batches have: rows, positions, and how many tokens, classes and frames there are.
ROWS, LENGTH, TOKENS, CLASSES, MELS = 8, 12, 40, 3, 8

#: The steps of a training, and its first loss scale.
STEPS, SCALE = 20, 2.0**10

#: The batches, which are trained on in turn.
_BATCHES = 4

Batch = tuple[Any, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of keras-hub.

    Attributes:
        make: Makes it, with Dropout of the rate that it is given, and other random layers if that is not 0.
        batch: Draws inputs and labels.
        blocks: The paths of the layers that are recomputed.
        loss: What it is trained with; None takes the loss that the task chooses by itself.
        learning_rate: That of Adam.
        tolerance: The largest relative difference between losses in float16 and in float32.
        keep_float32: The layers that cannot compute in float16.
        multiplies_float32: What else multiplies in float32, by the names of its ops: Keras does not cast the
            table of an Embedding, so that logits made by it are float32, and keras-hub not the angles of positions.
    """

    make: Callable[[float], Any]
    batch: Callable[[np.random.Generator], Batch]
    blocks: str
    loss: Any = None
    learning_rate: float = 1e-2
    tolerance: float = 6e-3
    keep_float32: Sequence[str] = ()
    multiplies_float32: str = "token_embedding"


_TEXT = {"vocabulary_size": TOKENS, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}


def _tokens(rng: np.random.Generator, name: str = "") -> dict[str, np.ndarray]:
    """Draw sequences, the last of which are padded."""
    padding_mask = np.ones([ROWS, LENGTH], np.int32)
    padding_mask[ROWS // 2 :, LENGTH - 3 :] = 0
    token_ids = rng.integers(1, TOKENS, [ROWS, LENGTH]).astype(np.int32) * padding_mask
    return {f"{name}token_ids": token_ids, f"{name}padding_mask": padding_mask}


def _classes_of_tokens(rng: np.random.Generator) -> Batch:
    x = _tokens(rng)
    return x, x["token_ids"][:, 1] % CLASSES


def _with_segments(batch: Batch) -> Batch:
    x, y = batch
    segment_ids = np.zeros([ROWS, LENGTH], np.int32)
    segment_ids[:, LENGTH // 2 :] = 1
    return {**x, "segment_ids": segment_ids}, y


def _masked_tokens(rng: np.random.Generator) -> Batch:
    x, _ = _with_segments((_tokens(rng), np.zeros(0)))
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


def _albert(dropout: float) -> Any:
    backbone = keras_hub.models.AlbertBackbone(
        **_TEXT, embedding_dim=8, num_inner_repetitions=2, max_sequence_length=LENGTH, dropout=dropout
    )
    return keras_hub.models.AlbertTextClassifier(backbone, CLASSES, dropout=dropout)


def _bert(dropout: float) -> Any:
    backbone = keras_hub.models.BertBackbone(**_TEXT, max_sequence_length=LENGTH, dropout=dropout)
    return keras_hub.models.BertMaskedLM(backbone)


def _deberta(dropout: float) -> Any:
    backbone = keras_hub.models.DebertaV3Backbone(**_TEXT, max_sequence_length=LENGTH, bucket_size=4, dropout=dropout)
    return keras_hub.models.DebertaV3TextClassifier(backbone, CLASSES, dropout=dropout)


def _gpt2(dropout: float) -> Any:
    backbone = keras_hub.models.GPT2Backbone(**_TEXT, max_sequence_length=LENGTH, dropout=dropout)
    return keras_hub.models.GPT2CausalLM(backbone)


def _gemma(dropout: float) -> Any:
    config = {name: value for name, value in _TEXT.items() if name != "num_heads"}
    backbone = keras_hub.models.GemmaBackbone(
        **config, num_query_heads=2, num_key_value_heads=1, head_dim=8, dropout=dropout
    )
    return keras_hub.models.GemmaCausalLM(backbone)


def _t5(dropout: float) -> Any:
    backbone = keras_hub.models.T5Backbone(**_TEXT, dropout=dropout)
    logits = keras.layers.Dense(TOKENS, name="logits")
    return keras.Model(backbone.input, logits(backbone(backbone.input)["decoder_sequence_output"]))


def _whisper(dropout: float) -> Any:
    backbone = keras_hub.models.WhisperBackbone(
        **_TEXT,
        num_mels=MELS,
        max_encoder_sequence_length=2 * LENGTH,
        max_decoder_sequence_length=LENGTH,
        dropout=dropout,
    )
    logits = keras.layers.Dense(TOKENS, name="logits")
    return keras.Model(backbone.input, logits(backbone(backbone.input)["decoder_sequence_output"]))


def _vit(dropout: float) -> Any:
    backbone = keras_hub.models.ViTBackbone((32, 32, 3), 8, 2, 2, 16, 32, dropout, dropout)
    return keras_hub.models.ViTImageClassifier(backbone, CLASSES, dropout=dropout)


def _resnet(dropout: float) -> Any:
    backbone = keras_hub.models.ResNetBackbone(
        [64], [3], [64, 64], [1, 1], [1, 2], "basic_block", image_shape=(32, 32, 3)
    )
    return keras_hub.models.ResNetImageClassifier(backbone, CLASSES, dropout=dropout)


#: The tolerances are about three times what was measured. The losses of images fall to a hundredth, and the same error
#: is a larger share of them.
#:
#: By the names of their classes, which are the rows of the table.
MODELS: Mapping[str, Model] = {
    "AlbertTextClassifier": Model(
        make=_albert, batch=lambda rng: _with_segments(_classes_of_tokens(rng)), blocks=r".*/group_\d+_inner_layer_\d+"
    ),
    "BertMaskedLM": Model(make=_bert, batch=_masked_tokens, blocks=r".*/transformer_layer_\d+"),
    "DebertaV3TextClassifier": Model(
        make=_deberta, batch=_classes_of_tokens, blocks=r".*/disentangled_attention_encoder_layer_\d+"
    ),
    "GPT2CausalLM": Model(make=_gpt2, batch=_next_tokens, blocks=r".*/transformer_layer_\d+"),
    "GemmaCausalLM": Model(
        make=_gemma,
        batch=_next_tokens,
        blocks=r".*/decoder_block_\d+",
        multiplies_float32="token_embedding|rotary_embedding",
    ),
    "T5Backbone": Model(
        make=_t5,
        batch=_translations,
        blocks=r".*/transformer_(en|de)coder_layer_\d+",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # Their masks are products with -1e9, which is infinite in float16, and 0 times infinity is NaN.
        keep_float32=[r".*/(self|cross)_attention"],
        multiplies_float32="(self|cross)_attention",
    ),
    "WhisperBackbone": Model(
        make=_whisper,
        batch=_transcripts,
        blocks=r".*/transformer_(en|de)coder_layer_\d+",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ),
    "ViTImageClassifier": Model(make=_vit, batch=_images, blocks=r".*/vit_encoder", learning_rate=1e-3, tolerance=2e-2),
    "ResNetImageClassifier": Model(
        make=_resnet, batch=_images, blocks=r".*/stack\d+_block\d+_\d_conv", learning_rate=1e-3, tolerance=6e-2
    ),
}


def make(name: str, *, seed: int = 2, dropout: float = 0.0) -> Any:
    """Make a model in float32; the same seed gives the same weights."""
    keras.utils.set_random_seed(seed)
    return MODELS[name].make(dropout)


@cache
def batches(name: str, seed: int = 5) -> Sequence[Batch]:
    """Return the batches of a model."""
    rng = np.random.default_rng(seed)
    return [MODELS[name].batch(rng) for _ in range(_BATCHES)]


def adam(name: str, **settings: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(MODELS[name].learning_rate, **settings)


def scaled(optimizer: keras.optimizers.Optimizer) -> tfmp.LossScaleOptimizer:
    """Wrap an optimizer; at this scale no step of these models overflows."""
    return tfmp.LossScaleOptimizer(optimizer, initial_scale=SCALE)


def prepare(model: Any, name: str, optimizer: Any, level: str = "O2") -> None:
    """Compile a model and set its level as a user does: a task of keras-hub chooses its loss by itself."""
    loss = MODELS[name].loss
    model.compile(optimizer, **({} if loss is None else {"loss": loss}))
    if level != "O0":
        tfmp.set_precision(model, level, keep_float32=MODELS[name].keep_float32)
    # A step that makes the slots is traced twice.
    model.optimizer.build(model.trainable_variables)


def compiled(name: str, optimizer: Any, level: str = "O2", *, seed: int = 2, dropout: float = 0.0) -> Any:
    model = make(name, seed=seed, dropout=dropout)
    prepare(model, name, optimizer, level)
    return model


def train(model: Any, name: str, steps: int, *, first: int = 0, callbacks: Sequence[Any] = ()) -> list[float]:
    """Train on the batches in turn, from the one of a step on, and return the loss of each step."""
    x, y = tf.nest.map_structure(lambda *parts: np.stack(parts), *batches(name))
    examples = tf.data.Dataset.from_tensor_slices((x, y)).repeat().skip(first % _BATCHES)
    fitted = model.fit(examples, epochs=steps, steps_per_epoch=1, shuffle=False, verbose=0, callbacks=list(callbacks))
    return fitted.history["loss"]


@cache
def losses_in_float32(name: str, seed: int = 2) -> list[float]:
    """Return the loss of each step of a training without tfmp."""
    return train(compiled(name, adam(name), "O0", seed=seed), name, STEPS)


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two trainings' losses; NaN if a loss is."""
    return float(np.max(np.abs(np.divide(losses, expected) - 1.0)))
