"""BERT: the encoder, the masked-word head and the next-sentence head.

Activations, and the gradients between layers, have the types of the chosen level of precision. Layer normalisation,
softmax and the losses are computed in float32, and the weights are stored in float32, but for those of O3.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence

import tensorflow as tf

import tfmp
from estimator_examples.bert.pretraining_data import PAD_ID

tf1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The shape of a model.

    Attributes:
        dropout: The share of activations dropped in training; 0 outside training.
        precision: The level of precision, for `tfmp.precision`: "O0", "O1", "O2" or "O3".
        recompute: Whether the gradients compute each layer of the encoder again, so that less is kept in memory.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    seq_length: int
    dropout: float
    precision: str
    recompute: bool = False

    @property
    def dtype(self) -> tf.DType:
        """The type of matrix products."""
        return tf.float32 if self.precision == "O0" else tf.float16

    @property
    def head_size(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_heads


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of the two heads.

    Attributes:
        word_logits: float32, [batch * predictions, vocabulary].
        next_logits: float32, [batch, 2]; class 1 means that the second part is from another document.
    """

    word_logits: tf.Tensor
    next_logits: tf.Tensor


def bert(features: dict[str, tf.Tensor], config: BertConfig) -> Outputs:
    """Build the model on a batch of features.

    Args:
        features: int32 tensors `input_ids`, `segment_ids` [batch, seq_length] and
            `masked_positions` [batch, predictions].
        config: The shape of the model.

    Returns:
        The logits of both heads.
    """
    with tfmp.precision(config.precision), tf1.variable_scope("bert"):
        table = _embeddings("word_embeddings", config.vocab_size, config)
        x = tfmp.ranges.probe(_embed(features, table, config), "embeddings")
        visible = tf.not_equal(features["input_ids"], PAD_ID)
        for i in range(config.num_layers):
            with tf1.variable_scope(f"layer_{i}"):
                x = (
                    _recomputed_layer(x, visible, config)
                    if config.recompute
                    else _transformer_layer(x, visible, config)
                )
        with tf1.variable_scope("encoder_output"):
            x = tfmp.ranges.probe(_layer_norm(x), "encoder_output")
        return Outputs(
            word_logits=_word_head(_gather(x, features["masked_positions"], config), table, config),
            next_logits=_next_head(x[:: config.seq_length], config),
        )


def count_weights(config: BertConfig) -> int:
    """Return the number of trainable weights, by building the model in a temporary graph."""
    with tf.Graph().as_default():
        tokens = tf.zeros([1, config.seq_length], tf.int32)
        bert({"input_ids": tokens, "segment_ids": tokens, "masked_positions": tokens[:, :1]}, config)
        return sum(variable.shape.num_elements() for variable in tf1.trainable_variables())


def matmul(a: tf.Tensor, b: tf.Tensor, dtype: tf.DType, transpose_b: bool = False) -> tf.Tensor:
    """Multiply as on Tensor Cores: inputs in `dtype`, sums in float32, and a result that is rounded to `dtype` once.

    The gradients are computed in the same way. On a CPU, TensorFlow 2.15 multiplies float16 matrices about 250 times
    slower than float32 matrices; this function takes about as long as a float32 product.
    """
    a, b = (tf.cast(tf.cast(each, dtype), tf.float32) for each in (a, b))
    # At O1, autocast would multiply in float16.
    with tfmp.autocast(enabled=False):
        product = tf.matmul(a, b, transpose_b=transpose_b)
    return tf.cast(product, dtype)


def word_losses(outputs: Outputs, features: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the loss of every masked position, and its weight, which is 0 for padding.

    Returns:
        float32 losses and weights, both [batch * predictions].
    """
    labels = tf.reshape(features["masked_ids"], [-1])
    weights = tf.cast(tf.reshape(features["masked_weights"], [-1]), tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs.word_logits)
    return losses, weights


def mean_losses(outputs: Outputs, features: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the mean losses of masked words and of next sentences, float32 scalars."""
    losses, weights = word_losses(outputs, features)
    return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights), tf.reduce_mean(next_losses(outputs, features))


def next_losses(outputs: Outputs, features: dict[str, tf.Tensor]) -> tf.Tensor:
    """Compute the next-sentence loss of every example, float32 [batch]."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=features["random_next"][:, 0], logits=outputs.next_logits
    )


def _embed(features: dict[str, tf.Tensor], table: tf.Tensor, config: BertConfig) -> tf.Tensor:
    positions = _embeddings("position_embeddings", config.seq_length, config)
    segments = _embeddings("segment_embeddings", 2, config)
    # The table has two rows only, so a product is cheaper than the sparse gradient of a look-up.
    segment = matmul(
        tf.one_hot(tf.reshape(features["segment_ids"], [-1]), 2, dtype=config.dtype), segments, config.dtype
    )
    words = tf.gather(table, features["input_ids"]) + positions
    x = tf.reshape(words, [-1, config.hidden_size]) + segment
    return _dropout(_layer_norm(x), config)


def _recomputed_layer(x: tf.Tensor, visible: tf.Tensor, config: BertConfig) -> tf.Tensor:
    # Dropout must have the same masks both times, so what they depend on is drawn here.
    source = zlib.crc32(tf1.get_variable_scope().name.encode())
    seeds = tf.unstack(tf.random.uniform([3, 2], maxval=tf.int32.max, dtype=tf.int32, seed=source))
    return tfmp.recompute(_transformer_layer)(x, visible, config, seeds)


def _transformer_layer(
    x: tf.Tensor, visible: tf.Tensor, config: BertConfig, seeds: Sequence[tf.Tensor | None] = (None, None, None)
) -> tf.Tensor:
    # The input of each part is normalised, not its output as in the original BERT: a small model then learns without a
    # long warm-up.
    with tf1.variable_scope("attention"):
        mixed = _attention(_layer_norm(x), visible, config, seeds[0])
        x = _probe(x + _dropout(_dense(mixed, config.hidden_size, "output", config), config, seeds[1]))
    with tf1.variable_scope("feed_forward"):
        inner = _gelu(_dense(_layer_norm(x), 4 * config.hidden_size, "intermediate", config))
        return _probe(x + _dropout(_dense(inner, config.hidden_size, "output", config), config, seeds[2]))


def _attention(x: tf.Tensor, visible: tf.Tensor, config: BertConfig, seed: tf.Tensor | None) -> tf.Tensor:
    def heads(name: str) -> tf.Tensor:
        flat = _dense(x, config.hidden_size, name, config)
        split = tf.reshape(flat, [-1, config.seq_length, config.num_heads, config.head_size])
        return tf.transpose(split, [0, 2, 1, 3])

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = _probe(matmul(query / math.sqrt(config.head_size), key, config.dtype, transpose_b=True), "scores")
    hidden = tf.cast(tf.logical_not(visible), tf.float32)[:, tf.newaxis, tf.newaxis, :]
    shares = tf.nn.softmax(tf.cast(scores, tf.float32) - 1e9 * hidden)
    mixed = matmul(_dropout(tf.cast(shares, x.dtype), config, seed), value, config.dtype)
    return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, config.hidden_size])


def _gather(x: tf.Tensor, positions: tf.Tensor, config: BertConfig) -> tf.Tensor:
    starts = tf.range(tf.shape(positions)[0])[:, tf.newaxis] * config.seq_length
    return tf.gather(x, tf.reshape(starts + positions, [-1]))


def _word_head(x: tf.Tensor, table: tf.Tensor, config: BertConfig) -> tf.Tensor:
    with tf1.variable_scope("word_head"):
        x = _layer_norm(_gelu(_dense(x, config.hidden_size, "transform", config)))
        bias = _bias([config.vocab_size])
        return tf.cast(_probe(matmul(x, table, config.dtype, transpose_b=True) + bias), tf.float32)


def _next_head(first_tokens: tf.Tensor, config: BertConfig) -> tf.Tensor:
    with tf1.variable_scope("next_head"):
        pooled = tf.tanh(_dense(first_tokens, config.hidden_size, "pooler", config))
        return tf.cast(_probe(_dense(pooled, 2, "output", config)), tf.float32)


def _probe(x: tf.Tensor, part: str = "") -> tf.Tensor:
    """Name an activation after the current scope, and perhaps a part of it, for `tfmp.check_precision`."""
    scope = tf1.get_variable_scope().name.removeprefix("bert/")
    return tfmp.ranges.probe(x, f"{scope}/{part}" if part else scope)


def _dense(x: tf.Tensor, units: int, name: str, config: BertConfig) -> tf.Tensor:
    with tf1.variable_scope(name):
        width = x.shape.as_list()[-1]
        return matmul(x, _weights("kernel", [width, units], fan=width), config.dtype) + _bias([units])


def _gelu(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.nn.gelu(tf.cast(x, tf.float32), approximate=True), x.dtype)


def _layer_norm(x: tf.Tensor) -> tf.Tensor:
    with tf1.variable_scope("LayerNorm"):
        width = x.shape.as_list()[-1:]
        gamma = tf1.get_variable("gamma", width, tf.float32, tf1.ones_initializer())
        beta = tf1.get_variable("beta", width, tf.float32, tf1.zeros_initializer())
        wide = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(wide, [-1], keepdims=True)
        normal = (wide - mean) * tf.math.rsqrt(variance + 1e-12)
        return tf.cast(normal * gamma + beta, x.dtype)


def _dropout(x: tf.Tensor, config: BertConfig, seed: tf.Tensor | None = None) -> tf.Tensor:
    if not config.dropout:
        return x
    if seed is None:
        return tf.nn.dropout(x, rate=config.dropout)
    return tf.nn.experimental.stateless_dropout(x, rate=config.dropout, seed=seed)


def _embeddings(name: str, rows: int, config: BertConfig) -> tf.Tensor:
    return _weights(name, [rows, config.hidden_size], fan=config.hidden_size)


def _weights(name: str, shape: list[int], fan: int) -> tf.Tensor:
    # The seed is computed from the name, so that the float32 graph and the float16 graph start from the same weights
    # although their operations are numbered differently.
    seed = zlib.crc32(f"{tf1.get_variable_scope().name}/{name}".encode())
    # BERT uses the constant 0.02, which suits its width of 768 but not the small widths here.
    initializer = tf1.truncated_normal_initializer(stddev=1 / math.sqrt(fan), seed=seed)
    return tf1.get_variable(name, shape, initializer=initializer)


def _bias(shape: list[int]) -> tf.Tensor:
    return tf1.get_variable("bias", shape, initializer=tf1.zeros_initializer())
