"""TensorFlow Addons: its layers, losses, callbacks and optimizers in models that compute in float16."""

import functools
from pathlib import Path
from typing import Any

import keras2_suite as suite
import numpy as np
import pytest
import table
import tensorflow as tf

import tfmp
from benchmarks.legacy_optimizers import load

pytest.importorskip(
    "tensorflow_addons", reason="needs tensorflow-addons, which the tox environment works_with_keras2 installs"
)
tfa = load("tensorflow_addons")
keras = suite.keras_of(tfa.layers.Maxout)

LIBRARY = table.Library(
    name="TensorFlow Addons",
    distribution="tensorflow-addons",
    beside=["keras", "tf_keras", "tensorflow"],
    write='`tfmp.set_precision(model, "O2")`, then `model.compile(tfmp.LossScaleOptimizer(tfa.optimizers.LAMB()))`, '
    "with tfmp's wrapper outside of those of Addons",
    limits="`WeightNormalization` and `Sparsemax` fail in float16, with any wrapper: name them in `keep_float32`. "
    "`SpectralNormalization` changes its kernel in the forward pass, also in a step that is skipped. A "
    "model with `Snake` cannot be saved by `tf.train.Checkpoint`. The callback `AverageModelCheckpoint` "
    "accepts only Addons' own optimizers, no wrapper around one: save the averages by "
    "`opt.inner_optimizer.assign_average_vars`. [All optimizers](legacy_optimizers.md) have a table of their own.",
)

pytestmark = [pytest.mark.works_with(LIBRARY), pytest.mark.filterwarnings("default")]

_ROWS, _LENGTH, _CLASSES = 16, 6, 4


def _dense() -> Any:
    layers = [tfa.layers.GELU(), keras.layers.Dense(16, name="hidden"), tfa.layers.Maxout(8), tfa.layers.TLU()]
    last = keras.layers.Dense(_CLASSES, name="logits")
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(16, name="first"), *layers, last])


def _attention() -> Any:
    rows = keras.Input([_LENGTH, 8])
    attended = tfa.layers.MultiHeadAttention(head_size=8, num_heads=2, name="attention")([rows, rows])
    together = tfa.layers.StochasticDepth(1.0, name="depth")([rows, keras.layers.Dense(8, name="back")(attended)])
    normalized = tfa.layers.GroupNormalization(4, name="groups")(together)
    pooled = keras.layers.GlobalAveragePooling1D()(normalized)
    return keras.Model(rows, keras.layers.Dense(_CLASSES, name="logits")(pooled))


@functools.cache
def _subject_of(model: str) -> suite.Subject:
    rng, is_dense = np.random.default_rng(0), model == "dense"
    focal = tfa.losses.SigmoidFocalCrossEntropy(from_logits=True, reduction="sum_over_batch_size")

    def make() -> Any:
        keras.utils.set_random_seed(1)
        return _dense() if is_dense else _attention()

    def optimizer() -> Any:
        if is_dense:
            return tfa.optimizers.LAMB(1e-2)
        return tfa.optimizers.Lookahead(tfa.optimizers.RectifiedAdam(1e-2), 3)

    def batch() -> tuple[tf.Tensor, tf.Tensor]:
        x = rng.normal(size=(_ROWS, 8) if is_dense else (_ROWS, _LENGTH, 8))
        labels = np.argmax(x.reshape([_ROWS, -1, 8]).mean(axis=1)[:, :_CLASSES], axis=-1)
        return tf.constant(x, tf.float32), tf.one_hot(labels, _CLASSES)

    return suite.Subject(
        keras=keras,
        make=make,
        optimizer=optimizer,
        batches=suite.four_in_turn(batch),
        loss=lambda of, taken: focal(taken[1], of(taken[0], training=True)),
        compile_with={"loss": focal},
        keep_float32=["logits"],
        float32=frozenset({"logits"}),
        tolerance=1e-3,
        falls=0.98,
        recomputed=lambda made: tfmp.recompute_layers(made, "attention|groups"),
        rounding=(1e-4, 1e-6),
        lacks=frozenset({"recompute"} if is_dense else {}),
    )


class TestAddons(suite.Suite):
    models, subject = ("dense", "attention"), staticmethod(_subject_of)
    test_overflow_on_the_second_replica_is_skipped_on_both = None


@pytest.mark.feature("O1, O2", "dense")
@pytest.mark.parametrize("layer", ["WeightNormalization", "Sparsemax"])
def test_layers_that_fail_in_float16_work_if_they_are_kept(layer: str) -> None:
    """If this fails at its first assertion, the library has mended the layer, and it need not be kept any more."""
    makes = {
        "WeightNormalization": lambda: tfa.layers.WeightNormalization(keras.layers.Dense(4), name="kept"),
        "Sparsemax": lambda: tfa.layers.Sparsemax(name="kept"),
    }

    def output(**kwargs: Any) -> tf.Tensor:
        model = keras.Sequential([keras.Input([8]), makes[layer]()])
        tfmp.set_precision(model, "O2", **kwargs)
        return model(tf.ones([2, 8]))

    with pytest.raises((ValueError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError)):
        output()
    assert bool(tf.reduce_all(tf.math.is_finite(output(keep_float32=["kept"]))))


@pytest.mark.feature("callbacks", "attention")
def test_callbacks_of_tfmp_go_with_those_of_the_library(tmp_path: Path) -> None:
    subject = _subject_of("attention")
    x, y = (tf.concat(each, 0).numpy() for each in zip(*subject.batches[:4], strict=True))
    model = subject.at("O2")
    model.compile(suite.scaled(subject.optimizer()), **subject.compile_with)
    callbacks = [tfa.callbacks.TQDMProgressBar(), tfa.callbacks.TimeStopping(300), tfmp.LossScaleCallback()]
    history = model.fit(x, y, batch_size=_ROWS, epochs=2, verbose=0, callbacks=callbacks).history
    assert (history["loss_scale"], history["skipped_steps"]) == ([suite.SCALE] * 2, [0, 0])
    averaging = tfa.callbacks.AverageModelCheckpoint(True, str(tmp_path / "weights"), save_weights_only=True)
    model.compile(suite.scaled(tfa.optimizers.MovingAverage(keras.optimizers.legacy.SGD(0.01))), "mse")
    with pytest.raises(TypeError, match="MovingAverage or StochasticAverage"):
        model.fit(x, y, verbose=0, callbacks=[averaging])
