"""Levels go together with loss scaling, accumulation, replicas, clipping, recomputation and the check."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras

import tfmp

_SCALE = 1024.0


def _model(keras: ModuleType) -> Any:
    layers = keras.layers

    def dense(units: int, activation: str, seed: int) -> Any:
        return layers.Dense(units, activation, kernel_initializer=keras.initializers.GlorotUniform(seed=seed))

    return keras.Sequential(
        [
            keras.Input([8]),
            dense(8, "relu", 1),
            layers.BatchNormalization(),
            tfmp.Recompute(dense(8, "relu", 2)),
            dense(3, "softmax", 3),
        ]
    )


def _data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 8)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0.5)


def _optimizer(keras: ModuleType, **settings: Any) -> Any:
    inner = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0)
    return tfmp.LossScaleOptimizer(
        inner, tfmp.ExponentialUpdateLossScaleManager(_SCALE, 1000, 1, decr_ratio=0.5), **settings
    )


@for_every_keras()
@pytest.mark.parametrize("level", ["O1", "O2-bfloat16"])
def test_replicas_train_with_accumulation_and_clipping_and_skip_an_overflow_together(
    keras: ModuleType, level: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope(), tfmp.precision(level):
        model = _model(keras)
        opt = _optimizer(keras, accumulation_steps=2)
    model.compile(opt, "sparse_categorical_crossentropy")
    x, y = _data()
    history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert (int(opt.applied_steps), int(opt.skipped_steps)) == (8, 0)
    assert {tf.as_dtype(each.dtype).name for each in model.weights} <= {"float32", "uint32", "int64"}

    # The last row is the second replica's. In the second micro-batch, it overflows in the first layer.
    x = x[:16]
    x[15] = np.inf
    before = [each.numpy() for each in model.trainable_variables]
    model.fit(x, y[:16], batch_size=8, shuffle=False, verbose=0)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (8, 1, _SCALE / 2)
    for weight, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)


@for_every_keras("keras3", "keras2")
def test_checked_model_is_set_to_what_the_check_advises(keras: ModuleType) -> None:
    x, y = _data()
    layers = [
        keras.layers.Dense(8, kernel_initializer="ones", name="body"),
        keras.layers.Rescaling(1e5, name="planted"),
        keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(1e-5), name="head"),
    ]
    model = keras.Sequential([keras.Input([8]), *layers])
    report = tfmp.check_precision(model, "mse", [(x, y.astype(np.float32)[:, None])])
    assert "planted" in report.keep_float32
    tfmp.set_precision(model, "O2", keep_float32=report.keep_float32)
    assert np.isfinite(np.asarray(model(x), np.float32)).all()
    tfmp.set_precision(model, "O2")
    assert not np.isfinite(np.asarray(model(x), np.float32)).all()
