"""Recompute and recompute_layers for Keras 2: that of Keras 2.15 and that of tf_keras."""

import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer

import tfmp

for_every_keras2 = for_every_keras("keras2", "tf_keras")

_MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}
in_every_mode = pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES)


def _dense(keras: ModuleType, units: int, activation: Any = None, **settings: Any) -> Any:
    # Random initializers without a seed warn when they are used twice.
    initializer = keras.initializers.GlorotUniform(seed=units)
    return keras.layers.Dense(units, activation, kernel_initializer=initializer, **settings)


def _feed_forward(keras: ModuleType, policy: str) -> Any:
    layers = [_dense(keras, 8, "gelu", dtype=policy), keras.layers.LayerNormalization(dtype=policy)]
    return keras.Sequential([*layers, _dense(keras, 4, dtype=policy)], name="block")


def _normalized(keras: ModuleType, policy: str) -> Any:
    # A bias before a normalization has a gradient of rounding errors only, of which Adam makes steps.
    layers = [_dense(keras, 8, dtype=policy, use_bias=False), keras.layers.BatchNormalization(dtype=policy)]
    return keras.Sequential([*layers, keras.layers.ReLU(dtype=policy), _dense(keras, 4, dtype=policy)], name="block")


def _with_losses(keras: ModuleType, policy: str) -> Any:
    layer = _dense(keras, 8, "relu", dtype=policy, activity_regularizer="l2", kernel_regularizer="l1")
    return keras.Sequential([layer, _dense(keras, 4, dtype=policy)], name="block")


def _with_dropout(keras: ModuleType, policy: str) -> Any:
    # The generator has its state in a variable, as if `enable_tf_random_generator` had been called.
    dropout = keras.layers.Dropout(0.5, seed=1, rng_type="stateful", dtype=policy)
    return keras.Sequential([_dense(keras, 8, "relu", dtype=policy), dropout, _dense(keras, 4)], name="block")


def _nested(keras: ModuleType, policy: str) -> Any:
    inner = tfmp.Recompute(_normalized(keras, policy))
    return keras.Sequential([inner, _dense(keras, 4, "relu", dtype=policy)], name="outer")


#: `_normalized` is in `_nested`, and alone in the test of mixed precision, which also trains in float32.
_BLOCKS = [_feed_forward, _with_losses, _with_dropout, _nested]


def _batch(size: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=[size, 4]).astype(np.float32), rng.normal(size=[size, 1]).astype(np.float32)


def _model(keras: ModuleType, block: Any, **settings: Any) -> Any:
    inputs = keras.Input([4])
    model = keras.Model(inputs, _dense(keras, 1, dtype="float32", name="head")(block(inputs)))
    model.compile(**{"optimizer": optimizer(keras, "SGD", learning_rate=0.05), "loss": "mse"} | settings)
    return model


def _fit(model: Any) -> list[np.ndarray]:
    losses = model.fit(*_batch(24), batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
    return [np.array(losses), *model.get_weights()]


def _assert_equal(ours: list[Any], plain: list[Any], rtol: float = 0) -> None:
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


def _names(layer: Any) -> list[str]:
    """Return the names of the weights, without the numbers that Keras gives to layers without a name."""
    return [re.sub(r"_\d+/", "/", weight.name) for weight in layer.weights]


@in_every_mode
@pytest.mark.parametrize("make", _BLOCKS)
@for_every_keras2
def test_fit_trains_as_without_recomputation(keras: ModuleType, make: Any, mode: dict[str, bool]) -> None:
    plain = _model(keras, make(keras, "float32"), **mode)
    ours = _model(keras, tfmp.Recompute(make(keras, "float32")), **mode)
    assert _names(ours) == _names(plain)
    _assert_equal(_fit(ours), _fit(plain), rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        *(("mixed_float16", mode) for mode in _MODES.values()),
        *((policy, _MODES["graph"]) for policy in ("float32", "mixed_bfloat16")),
    ],
)
@for_every_keras2
def test_fit_in_mixed_precision_trains_as_without_recomputation(
    keras: ModuleType, policy: str, mode: dict[str, bool]
) -> None:
    wrapped = {"optimizer": tfmp.LossScaleOptimizer(optimizer(keras, "Adam", learning_rate=0.01))}
    again = {"optimizer": tfmp.LossScaleOptimizer(optimizer(keras, "Adam", learning_rate=0.01))}
    plain = _model(keras, _normalized(keras, policy), **mode, **wrapped)
    ours = _model(keras, tfmp.Recompute(_normalized(keras, policy)), **mode, **again)
    _assert_equal(_fit(ours), _fit(plain), rtol=1e-6 if policy == "float32" else 1e-3)


@in_every_mode
@for_every_keras2
def test_masks_are_handed_on(keras: ModuleType, mode: dict[str, bool]) -> None:
    ids = np.array([[1, 2, 0], [3, 0, 0]] * 4)

    def trained(recomputed: bool) -> list[np.ndarray]:
        inputs = keras.Input([3])
        x = keras.layers.Embedding(5, 4, mask_zero=True, embeddings_initializer="ones")(inputs)
        # An LSTM is traced three times as long, of which functions for GPUs are the larger part.
        cell = keras.layers.SimpleRNN if mode == _MODES["xla"] else keras.layers.LSTM
        rnn = cell(4, kernel_initializer=keras.initializers.GlorotUniform(1), return_sequences=True)
        block = keras.Sequential([_dense(keras, 4, "tanh"), rnn], name="block")
        x = (tfmp.Recompute(block) if recomputed else block)(x)
        model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x))
        model.compile("sgd", "mse", **mode)
        for layer in model.layers:
            layer.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) for w in layer.get_weights()])
        model.fit(ids, np.ones([8, 4]), verbose=0, epochs=2)
        return [*model.get_weights(), model.predict(ids, verbose=0)]

    _assert_equal(trained(True), trained(False), rtol=1e-6)


@for_every_keras2
def test_replicas_train_as_without_recomputation(keras: ModuleType, two_replicas: tf.distribute.Strategy) -> None:
    def trained(recomputed: bool) -> list[np.ndarray]:
        with two_replicas.scope():
            block = _normalized(keras, "float32")
            return _fit(_model(keras, tfmp.Recompute(block) if recomputed else block))

    _assert_equal(trained(True), trained(False), rtol=1e-6)


@for_every_keras2
def test_statistics_of_a_block_that_was_frozen_at_first_change_once_a_step(keras: ModuleType) -> None:
    def trained(recomputed: bool) -> list[np.ndarray]:
        block = _normalized(keras, "float32")
        model = _model(keras, tfmp.Recompute(block) if recomputed else block, run_eagerly=True)
        block.trainable = False
        model.train_on_batch(*_batch())
        block.trainable = True
        model.compile(optimizer(keras, "SGD", learning_rate=0.05), "mse", run_eagerly=True)
        model.train_on_batch(*_batch())
        return model.get_weights()

    _assert_equal(trained(True), trained(False), rtol=1e-6)


@for_every_keras2
def test_model_resets_the_states_of_a_wrapped_recurrent_layer(keras: ModuleType) -> None:
    cell = keras.layers.SimpleRNN(2, stateful=True, kernel_initializer="ones", recurrent_initializer="ones")
    inputs = keras.Input(batch_shape=[1, 2, 4])
    model = keras.Model(inputs, tfmp.Recompute(cell)(inputs))
    model(tf.ones([1, 2, 4]))
    assert np.any(cell.states[0].numpy() != 0)
    model.reset_states()
    assert not np.any(cell.states[0].numpy())
