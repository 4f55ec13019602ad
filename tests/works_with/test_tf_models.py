"""TF-models: its encoder and its residual net, with `OptimizerFactory` and orbit's loop."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import suite
import tensorflow as tf

import tfmp

encoders, models = suite.library("official.nlp.modeling.networks"), suite.library("official.nlp.modeling.models")
backbones, vision = (
    suite.library("official.vision.modeling.backbones"),
    suite.library("official.vision.modeling.classification_model"),
)
optimization, orbit = suite.library("official.modeling.optimization"), suite.library("orbit")
keras = suite.keras_of(models.BertClassifier)

pytestmark = [pytest.mark.works_with("TF-models"), pytest.mark.filterwarnings("default")]

_ROWS, _LENGTH, _WORDS, _CLASSES, _PIXELS = 8, 10, 50, 4, 16


def _bert() -> Any:
    sizes = {"vocab_size": _WORDS, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "inner_dim": 64}
    no_dropout = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
    encoder = encoders.BertEncoder(**sizes, **no_dropout, max_sequence_length=16)
    return models.BertClassifier(encoder, num_classes=_CLASSES, dropout_rate=0.0)


def _resnet() -> Any:
    images = keras.layers.InputSpec(shape=[None, _PIXELS, _PIXELS, 3])
    backbone = backbones.ResNet(18, input_specs=images, depth_multiplier=0.25)
    return vision.ClassificationModel(backbone, num_classes=_CLASSES, input_specs=images)


def _batch(model: str, rng: np.random.Generator) -> tuple[Any, tf.Tensor]:
    labels = tf.constant(rng.integers(0, _CLASSES, _ROWS))
    if model == "resnet":
        return tf.constant(rng.normal(size=(_ROWS, _PIXELS, _PIXELS, 3)), tf.float32), labels
    words = rng.integers(1, _WORDS, (_ROWS, _LENGTH))
    arrays = {"input_word_ids": words, "input_mask": np.ones_like(words), "input_type_ids": np.zeros_like(words)}
    return {name: tf.constant(values, tf.int32) for name, values in arrays.items()}, labels


def _optimizer(rate: float, clip_norm: float = 1.0) -> Any:
    decay = {"initial_learning_rate": rate, "decay_steps": 2 * suite.STEPS, "end_learning_rate": 0.0}
    config = optimization.OptimizationConfig(
        {
            "optimizer": {"type": "adamw", "adamw": {"weight_decay_rate": 0.01, "gradient_clip_norm": clip_norm}},
            "learning_rate": {"type": "polynomial", "polynomial": decay},
            "warmup": {"type": "linear", "linear": {"warmup_steps": 2}},
        }
    )
    factory = optimization.OptimizerFactory(config)
    return factory.build_optimizer(factory.build_learning_rate())


def _loss(model: Any, batch: Any) -> tf.Tensor:
    x, y = batch
    logits = tf.cast(model(x, training=True), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


@functools.cache
def _subject_of(model: str) -> suite.Subject:
    rng, is_bert = np.random.default_rng(0), model == "bert"
    blocks = r"bert_encoder.*/transformer/layer_\d" if is_bert else "res_net.*/residual_block.*"

    return suite.Subject(
        keras=keras,
        build=_bert if is_bert else _resnet,
        # Batch normalization over 8 images amplifies what float16 rounds, the more so the longer the steps are.
        optimizer=lambda: _optimizer(2e-3 if is_bert else 2e-4),
        batches=suite.four_in_turn(lambda: _batch(model, rng)),
        loss=_loss,
        compile_with={"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        keep_float32=[".*layer_norm"] if is_bert else [],
        tolerance=2e-3 if is_bert else 0.15,
        # In Keras' own wrapper AdamW forgets to clip, so here it does not clip: docs/reference/legacy_optimizers.md.
        in_keras_wrapper=lambda: _optimizer(2e-4, 0.0),
        recomputed=lambda made: tfmp.recompute_layers(made, blocks),
        rounding=(1e-5, 1e-6),
        lacks=frozenset() if is_bert else frozenset({"resume", "two replicas"}),
    )


class TestModels(suite.Suite):
    models, subject = ("bert", "resnet"), staticmethod(_subject_of)


@pytest.mark.feature("O1, O2")
@pytest.mark.parametrize("model", ["bert", "resnet"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_model_is_made_at_a_level_and_learns(model: str, level: str) -> None:
    subject = _subject_of(model)
    with tfmp.precision(level):
        made = subject.make()
    norms = {"embeddings/layer_norm", "self_attention_layer_norm", "output_layer_norm"} if model == "bert" else set()
    assert suite.computing_in(keras, made, "float32", keras.layers.LayerNormalization) == norms
    eight = dataclasses.replace(subject, batches=subject.batches[:1] * 8)
    losses = suite.fit(eight, made, suite.scaled(subject.optimizer()))
    assert losses[-1] < losses[0]


@pytest.mark.feature("check", "bert")
def test_check_of_the_float32_model_finds_what_must_be_kept() -> None:
    subject = _subject_of("bert")
    model = subject.make()
    report = tfmp.check_precision(model, subject.compile_with["loss"], subject.batches[:1], progress=False)
    assert (report.float16_error, report.keeping_fails, report.far_off) == (None, False, [])
    report.apply(model)
    assert math.isfinite(float(_loss(model, subject.batches[0])))


class _Trainer(orbit.StandardTrainer):  # type: ignore[misc, name-defined] # the library may be missing
    """A trainer of orbit that scales the loss as for Keras' own wrapper."""

    def __init__(self, loop: suite.Loop, subject: suite.Subject, factors: list[float]) -> None:
        pairs = [(*batch, factor) for batch, factor in zip(subject.batches, factors, strict=False)]
        data = tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(lambda *each: tf.stack(each), *pairs))
        super().__init__(data)
        self.model, self.optimizer = loop.model, loop.optimizer
        self.global_step = orbit.utils.create_global_step()

    def train_step(self, iterator: Any) -> None:
        x, y, factor = next(iterator)
        variables, opt = self.model.trainable_variables, self.optimizer
        with tf.GradientTape() as tape:
            loss = opt.get_scaled_loss(_loss(self.model, (x, y)) * factor)
        grads = opt.get_unscaled_gradients(tape.gradient(loss, variables))
        opt.apply_gradients(zip(grads, variables, strict=True))
        self.global_step.assign_add(1)


@pytest.mark.feature("overflow", "bert")
def test_orbits_trainer_trains_as_a_loop_does() -> None:
    subject, factors = _subject_of("bert"), [1.0, 1.0, math.inf, 1.0]
    loop, given = subject.loop(), subject.loop()
    trainer = _Trainer(given, subject, factors)
    orbit.Controller(trainer=trainer, global_step=trainer.global_step, steps_per_loop=2).train(steps=4)
    for batch, factor in zip(subject.batches, factors, strict=False):
        loop(batch, factor)
    assert given.counts == loop.counts == (3, 1, suite.SCALE / 2)
    for found, expected in zip(given.state, loop.state, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
