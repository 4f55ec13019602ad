"""Tests of the model: its numerics in both precisions, and the inputs on which its outputs depend."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from estimator_examples.bert import modeling

pytestmark = pytest.mark.estimator

tf1 = tf.compat.v1

CONFIG = modeling.BertConfig(
    vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, seq_length=16, dropout=0.0, precision="O0"
)


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    input_ids = rng.integers(5, 50, size=(3, 16))
    input_ids[:, 12:] = 0
    return {
        "input_ids": input_ids,
        "segment_ids": np.repeat([[0] * 8 + [1] * 8], 3, axis=0),
        "masked_positions": np.array([[1, 5], [2, 3], [4, 0]]),
        "masked_ids": rng.integers(5, 50, size=(3, 2)),
        "masked_weights": np.array([[1, 1], [1, 1], [1, 0]]),
        "random_next": np.array([[0], [1], [1]]),
    }


def _features(batch: dict[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(value, tf.int32) for name, value in batch.items()}


def _loss(features: dict[str, tf.Tensor], config: modeling.BertConfig) -> tf.Tensor:
    outputs = modeling.bert(features, config)
    losses, weights = modeling.word_losses(outputs, features)
    words = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    return words + tf.reduce_mean(modeling.next_losses(outputs, features))


class _Computed(NamedTuple):
    """The values of a model at its start."""

    weights: dict[str, np.ndarray]
    loss: np.ndarray
    grads: list[np.ndarray]
    high: list[np.ndarray]  #: Gradients of the loss, multiplied by a high loss scale.


@functools.cache
def _computed(precision: str) -> _Computed:
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        loss = _loss(_features(_batch()), dataclasses.replace(CONFIG, precision=precision))
        variables = tf1.trainable_variables()
        grads, high = (
            [tf.convert_to_tensor(grad) for grad in tf.gradients(scaled, variables)]
            for scaled in (loss, loss * 2.0**32)
        )
        session.run(tf1.global_variables_initializer())
        weights = {variable.op.name: variable.read_value() for variable in variables}
        return _Computed(*session.run((weights, loss, grads, high)))


@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_float16_rounds_what_float32_computes(precision: str) -> None:
    wide, half = _computed("O0"), _computed(precision)
    assert half.loss != wide.loss
    np.testing.assert_allclose(half.loss, wide.loss, rtol=5e-3)
    for rounded, exact in zip(half.grads, wide.grads, strict=True):
        assert precision == "O3" or rounded.dtype == np.float32
        np.testing.assert_allclose(rounded, exact, rtol=0.05, atol=0.02 * np.abs(exact).max() + 1e-4)


def test_a_high_loss_scale_overflows_in_float16_only() -> None:
    for precision, finite in (("O0", True), ("O1", False), ("O2", False), ("O3", False)):
        assert all(np.isfinite(value).all() for value in _computed(precision).high) == finite


@pytest.mark.parametrize(("position", "seen"), [(14, False), (10, True)], ids=["padding", "word"])
def test_every_word_sees_the_others_of_its_example_only(position: int, seen: bool, session: tf1.Session) -> None:
    batch = _batch()
    fed = {name: tf1.placeholder(tf.int32, [3, 16]) for name in ("input_ids", "segment_ids")}
    logits = modeling.bert({**_features(batch), **fed}, CONFIG).word_logits
    session.run(tf1.global_variables_initializer())
    changed = {name: batch[name].copy() for name in fed}
    changed["segment_ids"][0, position] ^= 1
    # Padding keeps its id, so that only its segment changes.
    if batch["input_ids"][0, position]:
        changed["input_ids"][0, position] = 7
    feeds = [{fed[name]: values[name] for name in fed} for values in (batch, changed)]
    before, after = (session.run(logits, feed) for feed in feeds)
    assert before.dtype == np.float32
    # One row for each masked word.
    assert before.shape == (6, 50)
    assert (before[:2] != after[:2]).any(axis=1).tolist() == [seen] * 2
    np.testing.assert_array_equal(before[2:], after[2:])


@pytest.mark.parametrize(("dropout", "precision"), [(0.0, "O0"), (0.0, "O1"), (0.5, "O0"), (0.5, "O1"), (0.5, "O2")])
def test_recomputed_layers_train_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, dropout: float, precision: str
) -> None:
    config = dataclasses.replace(CONFIG, dropout=dropout, precision=precision, recompute=True)

    # TensorFlow's arithmetic optimizer rewrites the two graphs in different ways, and float16 shows how each rounds.
    session_config = tf1.ConfigProto()
    session_config.graph_options.rewrite_options.disable_meta_optimizer = True

    def trained() -> tuple[list[str], list[float]]:
        with tf.Graph().as_default(), tf1.Session(config=session_config) as session:
            tf1.set_random_seed(1)
            # The masks of the embeddings' dropout are drawn by the number of their op, which is the same in all runs.
            loss = _loss(_features(_batch()), config)
            train_op = tf1.train.AdamOptimizer(0.01).minimize(loss)
            session.run(tf1.global_variables_initializer())
            names = [variable.op.name for variable in tf1.trainable_variables()]
            return names, [float(session.run([loss, train_op])[0]) for _ in range(5)]

    names, recomputed = trained()
    if not dropout:
        config = dataclasses.replace(config, recompute=False)
    monkeypatch.setattr("tfmp.recompute", lambda function: function)
    plain_names, plain = trained()
    assert names == plain_names
    np.testing.assert_allclose(recomputed, plain, rtol=1e-6)
    assert len(set(recomputed)) == 5
