"""TensorFlow Recommenders, whose models have a training step of their own that scales no loss."""

import functools
import logging
from typing import Any

import numpy as np
import pytest
import suite
import tensorflow as tf

import tfmp

tfrs = suite.library("tensorflow_recommenders")
keras = suite.keras_of(tfrs.Model)

pytestmark = [pytest.mark.works_with("TensorFlow Recommenders"), pytest.mark.filterwarnings("default")]

_USERS, _ITEMS, _ROWS = 30, 40, 16


class _Model(tfrs.Model):  # type: ignore[misc, name-defined] # the library may be missing
    """Two towers and a task, and the training step that a user writes for a scaled loss."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.user, self.item = (self._tower(name, size) for name, size in (("user", _USERS), ("item", _ITEMS)))
        self.rates = task == "ranking"
        # Under a strategy Keras takes no means of batches.
        squares = keras.losses.MeanSquaredError(reduction="sum")
        ranking = tfrs.tasks.Ranking(loss=squares, name="task")
        self.task = ranking if self.rates else tfrs.tasks.Retrieval(name="task")

    @staticmethod
    def _tower(name: str, size: int) -> Any:
        layers = [
            keras.layers.Embedding(size, 16, name=f"{name}_embedding"),
            keras.layers.Dense(32, "relu", name=f"{name}_hidden"),
            keras.layers.Dense(8, name=f"{name}_last"),
        ]
        return keras.Sequential([keras.Input([], dtype=tf.int32), *layers], name=name)

    def compute_loss(self, inputs: Any, training: bool = False) -> tf.Tensor:
        # `train_on_batch` puts what it is given into a tuple, `fit` with a dataset does not.
        inputs = inputs[0] if isinstance(inputs, tuple) else inputs
        users, items = self.user(inputs["user"], training=training), self.item(inputs["item"], training=training)
        weights = inputs.get("weight")
        if self.rates:
            rating = tf.reduce_sum(users * items, axis=-1, keepdims=True)
            return self.task(inputs["rating"], rating, sample_weight=weights) / _ROWS
        return self.task(users, items, sample_weight=weights, compute_metrics=False)


class _Scaling(_Model):
    def train_step(self, inputs: Any) -> dict[str, tf.Tensor]:
        if not hasattr(self.optimizer, "get_scaled_loss"):
            return super().train_step(inputs)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(inputs, training=True) + sum(self.losses)
            scaled = self.optimizer.get_scaled_loss(loss)
        grads = self.optimizer.get_unscaled_gradients(tape.gradient(scaled, self.trainable_variables))
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def _batch(rng: np.random.Generator) -> dict[str, tf.Tensor]:
    users = rng.integers(0, _USERS, _ROWS)
    # Who likes what is not random, so that it can be learned.
    items = (users * 7 + rng.integers(0, 3, _ROWS)) % _ITEMS
    return {
        "user": tf.constant(users, tf.int32),
        "item": tf.constant(items, tf.int32),
        "rating": tf.constant((users + items) % 5, tf.float32)[:, tf.newaxis],
        "weight": tf.ones([_ROWS]),
    }


def _make(task: str, kind: type[_Model] = _Scaling) -> Any:
    model = kind(task)
    model.compute_loss(_batch(np.random.default_rng(0)))
    return model


def _recomputed(model: Any) -> Any:
    model.user, model.item = (tfmp.recompute_layers(each, ".*_hidden") for each in (model.user, model.item))
    return model


_TASKS = ("retrieval", "ranking")


@functools.cache
def _subject_of(model: str) -> suite.Subject:
    rng = np.random.default_rng(0)
    return suite.Subject(
        keras=keras,
        build=lambda: _make(model),
        optimizer=lambda: keras.optimizers.Adam(1e-2 if model == "retrieval" else 5e-3),
        batches=suite.four_in_turn(lambda: (_batch(rng),)),
        loss=lambda of, batch: of.compute_loss(batch[0], training=True),
        compile_with={},
        keep_float32=[".*_last", "task"],
        float32=frozenset({"user_last", "item_last"}),
        tolerance=3e-3,
        recomputed=_recomputed,
        callbacks=lambda _: [],
    )


class TestRecommenders(suite.Suite):
    models, subject = _TASKS, staticmethod(_subject_of)

    @pytest.mark.feature("check")
    def test_check_finishes_and_what_it_suggests_trains(self, model: str) -> None:
        """Such a model has no `call`: a function is checked."""
        subject = _subject_of(model)
        in_float32 = subject.make()
        report = tfmp.check_precision(
            lambda batch: in_float32.compute_loss(batch, training=True), None, [subject.batches[0][0]], progress=False
        )
        assert 2**4 <= report.suggested_loss_scale <= 2**20
        opt = tfmp.LossScaleOptimizer(subject.optimizer(), initial_scale=report.suggested_loss_scale)
        assert suite.learns(suite.fit(subject, subject.at("O2"), opt), 0.9)
        # The gradients grow while the model learns, and those for the activations were not looked at.
        assert int(opt.skipped_steps) <= 6


@pytest.mark.feature("callbacks", "retrieval")
def test_the_librarys_own_training_step_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It passes gradients of the loss as it is, so the updates of Adam are right, and small gradients are lost."""
    model = _make("retrieval", _Model)
    model.compile(suite.scaled(keras.optimizers.Adam(1e-2)))
    with caplog.at_level(logging.WARNING, logger="tfmp"):
        model.fit(tf.data.Dataset.from_tensors(_batch(np.random.default_rng(0))), verbose=0)
    assert "tensorflow_recommenders.models.base.Model.train_step" in caplog.text
    assert "get_scaled_loss" in caplog.text
