"""Hugging Face's TensorFlow models, with `create_optimizer`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras2_suite as suite
import numpy as np
import pytest
import table
import tensorflow as tf

import tfmp
from benchmarks.legacy_optimizers import load

for _package in ("transformers", "tf_keras"):
    pytest.importorskip(_package, reason=f"needs {_package}, which the tox environment works_with_keras2 installs")
tf_keras, transformers = load("tf_keras"), load("transformers")

LIBRARY = table.Library(
    name="Hugging Face transformers",
    distribution="transformers",
    beside=["tf_keras", "tensorflow"],
    write='`tfmp.set_precision(model, "O2")`, then `model.compile(tfmp.LossScaleOptimizer(create_optimizer(...)[0]))`; '
    "T5 needs `keep_float32`",
    limits="For `check_precision`, put the labels into the inputs, and pass `lambda labels, outputs: outputs.loss`. "
    "`recompute_layers` refuses these models, which are subclassed: replace each block by `tfmp.Recompute(block)` "
    "before the first call. T5's masks are infinite in float16, and its normalization squares in float16. What "
    "`check_precision` finds keeps the encoder as a whole in float32; more computes in float16 with "
    '`keep_float32=["shared", ".*Attention", ".*layer_norm"]`, to which you add `"encoder"` or `"decoder"` if hidden '
    "states exceed 65504 there.",
)

# transformers still calls functions that NumPy and Keras have deprecated.
pytestmark = [pytest.mark.works_with(LIBRARY), pytest.mark.filterwarnings("default")]

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
    config = transformers.GPT2Config(
        vocab_size=_WORDS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.TFGPT2LMHeadModel(config)


def _vit() -> Any:
    return transformers.TFViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=_CLASSES, **_SIZES, **_NO_DROPOUT)
    )


def _t5(feed_forward: str = "relu") -> Any:
    config = transformers.T5Config(
        vocab_size=_WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj=feed_forward,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        # As in the first T5 and in its version 1.1.
        tie_word_embeddings=feed_forward == "relu",
    )
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


_LACKS = {
    "bert": frozenset[str](),
    "t5": frozenset({"two replicas"}),
    "gpt2": frozenset({"two replicas", "resume"}),
    "vit": frozenset({"two replicas", "resume"}),
}


@functools.cache
def _subject_of(model: str) -> suite.Subject:
    rng, is_t5 = np.random.default_rng(0), model == "t5"
    batches = suite.four_in_turn(lambda: (_batch(model, rng),))

    def make() -> Any:
        tf_keras.utils.set_random_seed(1)
        made = _MAKES[model]()
        made(batches[0][0])
        return made

    return suite.Subject(
        keras=tf_keras,
        make=make,
        optimizer=lambda: transformers.create_optimizer(1e-2, 2 * suite.STEPS, 2, weight_decay_rate=0.01)[0],
        batches=batches,
        loss=_loss,
        compile_with={},
        keep_float32=_T5_KEEPS if is_t5 else [],
        float32=frozenset("qkvo" if is_t5 else ""),
        tolerance=5e-3 if is_t5 else 2e-3,
        lacks=_LACKS[model],
    )


#: Where the models have their blocks, and under which name.
_BLOCKS: dict[str, Callable[[Any], list[tuple[Any, str]]]] = {
    "bert": lambda model: [(model.bert.encoder, "layer")],
    "gpt2": lambda model: [(model.transformer, "h")],
    "vit": lambda model: [(model.vit.encoder, "layer")],
    "t5": lambda model: [(model.encoder, "block"), (model.decoder, "block")],
}


class TestTransformers(suite.Suite):
    models, subject = tuple(_MAKES), staticmethod(_subject_of)

    @pytest.mark.feature("check")
    def test_check_finishes_and_what_it_suggests_trains(self, model: str) -> None:
        subject = _subject_of(model)
        batches = [(inputs, inputs["labels"]) for (inputs,) in subject.batches[:2]]
        checked = subject.make()
        report = tfmp.check_precision(checked, lambda labels, outputs: outputs.loss, batches, progress=False)
        assert (report.float16_error, report.keeping_fails, report.far_off) == (None, False, [])
        assert 2**8 <= report.suggested_loss_scale <= 2**20
        assert report.float16_loss == pytest.approx(report.loss, rel=1e-3)
        assert {name for name in report.keep_float32 if "/" not in name} == ({"encoder"} if model == "t5" else set())
        tfmp.set_precision(checked, "O2", keep_float32=report.keep_float32)
        assert suite.computing_in(tf_keras, checked, "float16") >= ({"wi", "wo"} if model == "t5" else set())
        opt = tfmp.LossScaleOptimizer(subject.optimizer(), initial_scale=report.suggested_loss_scale)
        assert suite.farthest(suite.fit(subject, checked, opt), suite.losses(subject, "O0")) < 0.01

    @pytest.mark.feature("recompute")
    def test_recomputed_layers_have_the_same_gradients(self, model: str) -> None:
        subject = _subject_of(model)

        def gradients(of: Any) -> dict[str, np.ndarray]:
            with tf.GradientTape() as tape:
                loss = _loss(of, subject.batches[0])
            grads = zip(of.trainable_variables, tape.gradient(loss, of.trainable_variables), strict=True)
            return {_within(each): tf.convert_to_tensor(grad).numpy() for each, grad in grads if grad is not None}

        plain, recomputed = subject.make(), _MAKES[model]()
        with pytest.raises(TypeError, match=r"is subclassed and cannot be rebuilt: wrap its layers in tfmp\.Recompute"):
            tfmp.recompute_layers(plain, ".*")
        for holder, name in _BLOCKS[model](recomputed):
            setattr(holder, name, [tfmp.Recompute(block) for block in getattr(holder, name)])
        recomputed(subject.batches[0][0])
        values = {_within(weight): weight for weight in plain.weights}
        for weight in recomputed.weights:
            weight.assign(values[_within(weight)])
        found, expected = gradients(recomputed), gradients(plain)
        assert found.keys() == expected.keys()
        # Gradients of a variable that several layers use, such as T5's embedding, are summed in another order.
        for name, grad in found.items():
            np.testing.assert_allclose(grad, expected[name], rtol=1e-5, atol=1e-6)


def _within(weight: Any) -> str:
    """Return a variable's name without that of the model, which is numbered."""
    return str(weight.name).partition("/")[2]


@pytest.mark.feature("callbacks", "bert")
def test_callbacks_of_tfmp_go_with_those_of_the_library(tmp_path: Path) -> None:
    subject = _subject_of("bert")
    model = subject.at("O2")
    model.compile(suite.scaled(subject.optimizer()))
    inputs = {name: values[:4] for name, values in subject.batches[0][0].items()}
    data = tf.data.Dataset.from_tensor_slices(inputs).batch(2)
    seen = []

    def accuracy(predictions: Any) -> dict[str, float]:
        seen.append(predictions[1])
        return {"accuracy": float(np.mean(np.argmax(predictions[0], -1) == predictions[1]))}

    scale = tfmp.LossScaleCallback()
    history = model.fit(
        data,
        epochs=2,
        verbose=0,
        callbacks=[
            transformers.KerasMetricCallback(accuracy, data, label_cols=["labels"]),
            scale,
            tf_keras.callbacks.EarlyStopping("loss", patience=1),
            tf_keras.callbacks.ModelCheckpoint(tmp_path / "weights", save_weights_only=True),
        ],
    ).history
    assert history["loss_scale"] == [suite.SCALE] * 2
    assert history["skipped_steps"] == [0, 0]
    assert len(history["accuracy"]) == len(seen) == 2


def _with_large_hidden_states(feed_forward: str, factor: float) -> Any:
    """Return a T5 whose encoder has hidden states as large as those of trained ones, or larger."""
    tf_keras.utils.set_random_seed(1)
    model = _t5(feed_forward)
    model(_subject_of("t5").batches[0][0])
    weights = [each for each in model.encoder.block[0].weights if "/wo/" in each.name]
    weights[0].assign(weights[0] * factor)
    return model


@pytest.mark.feature("float32's curve", "t5")
def test_t5_is_nan_with_keras_own_wrapper_as_it_is_made() -> None:
    """If this fails, transformers has mended T5, and the page need not say any more what to keep in float32."""
    subject = _subject_of("t5")
    subject = dataclasses.replace(subject, keep_float32=[], batches=subject.batches[:2])
    found = suite.fit(subject, subject.at("O2"), suite.in_keras_own_wrapper(tf_keras, subject.optimizer()))
    assert np.all(np.isnan(found))


@pytest.mark.feature("float32's curve", "t5")
@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@pytest.mark.parametrize(
    ("factor", "also"), [(1e3, []), (1e5, ["encoder"])], ids=["beyond the squares of float16", "beyond float16"]
)
def test_t5_with_large_hidden_states_trains_on_the_curve_of_float32(
    feed_forward: str, factor: float, also: Sequence[str]
) -> None:
    subject = _subject_of("t5")
    subject = dataclasses.replace(
        subject,
        make=lambda: _with_large_hidden_states(feed_forward, factor),
        keep_float32=[*_T5_KEEPS, *also],
        batches=subject.batches[:10],
    )
    expected = suite.fit(subject, subject.at("O0"), subject.optimizer())
    model = subject.at("O2")
    assert suite.computing_in(tf_keras, model.decoder, "float16") >= {"wo"}
    found = suite.fit(subject, model, suite.scaled(subject.optimizer()))
    assert suite.farthest(found, expected) < 0.01


@pytest.mark.feature("float32's curve", "t5")
@pytest.mark.parametrize(("factor", "is_finite"), [(1e3, True), (1e5, False)])
def test_t5_without_what_is_kept_for_large_hidden_states_computes_wrongly(factor: float, is_finite: bool) -> None:
    """From 256 on, squares are infinite, and the normalization returns 0 without any error; from 65520 on, NaN."""

    def encoded(keep: Sequence[str]) -> np.ndarray:
        model = _with_large_hidden_states("relu", factor)
        tfmp.set_precision(model, "O2", keep_float32=keep)
        return model(_subject_of("t5").batches[0][0]).encoder_last_hidden_state.numpy()

    found = encoded(["shared", ".*Attention"] if is_finite else _T5_KEEPS)
    assert bool(np.all(np.isfinite(found))) == is_finite
    if is_finite:
        assert np.mean(np.all(found == 0, axis=-1)) > 0.5
    assert np.all(np.isfinite(encoded([*_T5_KEEPS, "encoder"])))
