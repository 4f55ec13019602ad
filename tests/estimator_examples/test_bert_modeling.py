"""Tests of the model: its numerics in both precisions, and the inputs on which its outputs depend."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from estimator_examples.bert import modeling

pytestmark = [
    pytest.mark.graph,
    pytest.mark.skipif(
        not hasattr(tf, "estimator"), reason=f"TensorFlow {tf.__version__} has no tf.estimator, which trains the model"
    ),
]

tf1 = tf.compat.v1

CONFIG = modeling.BertConfig(
    vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, seq_length=16, dropout=0.0, dtype=tf.float32
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


def _loss_and_gradients(dtype: tf.DType) -> tuple[np.ndarray, list[np.ndarray]]:
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        loss = _loss(_features(_batch()), dataclasses.replace(CONFIG, dtype=dtype))
        grads = tf.gradients(loss, tf1.trainable_variables())
        session.run(tf1.global_variables_initializer())
        return session.run((loss, [tf.convert_to_tensor(grad) for grad in grads]))


def test_float16_rounds_what_float32_computes() -> None:
    wide_loss, wide_grads = _loss_and_gradients(tf.float32)
    half_loss, half_grads = _loss_and_gradients(tf.float16)
    assert half_loss != wide_loss
    np.testing.assert_allclose(half_loss, wide_loss, rtol=5e-3)
    for half, wide in zip(half_grads, wide_grads, strict=True):
        assert half.dtype == np.float32
        np.testing.assert_allclose(half, wide, rtol=0.05, atol=0.02 * np.abs(wide).max() + 1e-4)


def test_a_high_loss_scale_overflows_in_float16_only() -> None:
    for dtype, finite in ((tf.float32, True), (tf.float16, False)):
        with tf.Graph().as_default(), tf1.Session() as session:
            loss = _loss(_features(_batch()), dataclasses.replace(CONFIG, dtype=dtype))
            grads = tf.gradients(loss * 2.0**32, tf1.trainable_variables())
            session.run(tf1.global_variables_initializer())
            values = session.run([tf.convert_to_tensor(grad) for grad in grads])
            assert all(np.isfinite(value).all() for value in values) == finite


def test_weights_are_stored_in_float32_and_the_same_in_both_precisions() -> None:
    stored = []
    for dtype in (tf.float32, tf.float16):
        with tf.Graph().as_default(), tf1.Session() as session:
            tf1.set_random_seed(1)
            modeling.bert(_features(_batch()), dataclasses.replace(CONFIG, dtype=dtype))
            session.run(tf1.global_variables_initializer())
            stored.append({variable.op.name: session.run(variable) for variable in tf1.trainable_variables()})
    wide, half = stored
    assert wide.keys() == half.keys()
    for name, value in half.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, wide[name])


def test_logits_are_float32_and_one_row_for_each_masked_word(session: tf1.Session) -> None:
    del session
    outputs = modeling.bert(_features(_batch()), dataclasses.replace(CONFIG, dtype=tf.float16))
    assert (outputs.word_logits.dtype, outputs.next_logits.dtype) == (tf.float32, tf.float32)
    assert outputs.word_logits.shape.as_list() == [6, 50]
    assert outputs.next_logits.shape.as_list() == [3, 2]


def _logits_after(session: tf1.Session, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the word logits before and after a change of segment and word at a position of the first example.

    Padding keeps its id, so that only its segment changes.
    """
    batch = _batch()
    ids = tf1.placeholder(tf.int32, [3, 16])
    segments = tf1.placeholder(tf.int32, [3, 16])
    outputs = modeling.bert({**_features(batch), "input_ids": ids, "segment_ids": segments}, CONFIG)
    session.run(tf1.global_variables_initializer())
    changed = {name: batch[name].copy() for name in ("input_ids", "segment_ids")}
    changed["segment_ids"][0, position] ^= 1
    if batch["input_ids"][0, position]:
        changed["input_ids"][0, position] = 7
    feeds = [{ids: values["input_ids"], segments: values["segment_ids"]} for values in (batch, changed)]
    before, after = (session.run(outputs.word_logits, feed) for feed in feeds)
    return before, after


def test_padding_does_not_change_the_outputs(session: tf1.Session) -> None:
    before, after = _logits_after(session, position=14)
    np.testing.assert_array_equal(before, after)


def test_every_word_sees_the_others_of_its_example_only(session: tf1.Session) -> None:
    before, after = _logits_after(session, position=10)
    assert (before[:2] != after[:2]).any(axis=1).all()
    np.testing.assert_array_equal(before[2:], after[2:])


def test_matmul_rounds_once_like_a_tensor_core(session: tf1.Session) -> None:
    # float16 cannot represent 2048 + 1, so a sum in float16 that adds 1 at a time would stay at 2048.
    row = np.full((1, 4096), 1.0, np.float16)
    product = session.run(modeling.matmul(tf.constant(row), tf.constant(row), transpose_b=True))
    assert product.dtype == np.float16
    assert product.item() == 4096.0


def test_dropout_is_off_when_it_is_zero(session: tf1.Session) -> None:
    features = _features(_batch())
    with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
        still = _loss(features, CONFIG)
        dropping = _loss(features, dataclasses.replace(CONFIG, dropout=0.5))
    session.run(tf1.global_variables_initializer())
    assert session.run(still) == session.run(still)
    assert session.run(dropping) != session.run(dropping)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_layers_train_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, dropout: float, dtype: tf.DType
) -> None:
    config = dataclasses.replace(CONFIG, dropout=dropout, dtype=dtype, recompute=True)

    # TensorFlow's arithmetic optimizer rewrites the two graphs in different ways, and float16 shows how each rounds.
    session_config = tf1.ConfigProto()
    session_config.graph_options.rewrite_options.disable_meta_optimizer = True

    def trained() -> list[float]:
        with tf.Graph().as_default(), tf1.Session(config=session_config) as session:
            tf1.set_random_seed(1)
            # The masks of the embeddings' dropout are drawn by the number of their op, which is the same in all runs.
            loss = _loss(_features(_batch()), config)
            train_op = tf1.train.AdamOptimizer(0.01).minimize(loss)
            session.run(tf1.global_variables_initializer())
            return [float(session.run([loss, train_op])[0]) for _ in range(5)]

    recomputed = trained()
    monkeypatch.setattr("tfmp.recompute", lambda function: function)
    np.testing.assert_allclose(recomputed, trained(), rtol=1e-6)
    assert len(set(recomputed)) == 5


def test_recomputed_layers_have_the_weights_and_losses_of_plain_ones() -> None:
    losses = []
    for recompute in (False, True):
        with tf.Graph().as_default(), tf1.Session() as session:
            tf1.set_random_seed(1)
            loss = _loss(_features(_batch()), dataclasses.replace(CONFIG, recompute=recompute))
            train_op = tf1.train.AdamOptimizer(0.01).minimize(loss)
            session.run(tf1.global_variables_initializer())
            names = [variable.op.name for variable in tf1.trainable_variables()]
            losses.append((names, [float(session.run([loss, train_op])[0]) for _ in range(5)]))
    (plain_names, plain), (names, recomputed) = losses
    assert names == plain_names
    np.testing.assert_allclose(recomputed, plain, rtol=1e-6)
