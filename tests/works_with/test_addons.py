"""TensorFlow Addons: its layers, losses, callbacks and optimizers in models that compute in float16."""

import functools
from typing import Any

import numpy as np
import pytest
import suite
import tensorflow as tf

import tfmp

tfa = suite.library("tensorflow_addons")
keras = suite.keras_of(tfa.layers.Maxout)

pytestmark = [pytest.mark.works_with("TensorFlow Addons"), pytest.mark.filterwarnings("default")]

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
        build=_dense if is_dense else _attention,
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
        callbacks=None if is_dense else lambda _: [tfa.callbacks.TQDMProgressBar(), tfa.callbacks.TimeStopping(300)],
        lacks=frozenset({"recompute"} if is_dense else {}),
    )


class TestAddons(suite.Suite):
    models, subject = ("dense", "attention"), staticmethod(_subject_of)
    test_overflow_on_the_second_replica_is_skipped_on_both = None
