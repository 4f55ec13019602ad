"""Recompute and recompute_layers for Keras 2: that of Keras 2.15 and that of tf_keras."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
@pytest.mark.essential("tf_keras-_nested-eager", "tf_keras-_with_dropout-graph", "tf_keras-_feed_forward-xla")
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


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize(
    "compiled", [_eager, tf.function, tf.function(jit_compile=True)], ids=["eager", "graph", "xla"]
)
@for_every_keras2
def test_gradients_of_an_own_loop_are_those_without_recomputation(keras: ModuleType, compiled: Any) -> None:
    block = _with_losses(keras, "float32")
    x = tf.constant(_batch()[0])

    @compiled
    def gradients(recomputed: bool) -> Any:
        layer = wrapped if recomputed else block
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y**2) + tf.add_n(layer.losses)
        return [loss, *tape.gradient(loss, [x, *layer.trainable_variables])]

    wrapped = tfmp.Recompute(block)
    plain = gradients(False)
    _assert_equal(gradients(True), plain, rtol=1e-6)


@for_every_keras2
def test_losses_are_the_same_before_and_after_the_gradients(keras: ModuleType) -> None:
    block = _with_losses(keras, "float32")
    wrapped = tfmp.Recompute(block)
    x = tf.constant(_batch()[0])
    block(x, training=True)
    expected = [float(loss) for loss in block.losses]
    with tf.GradientTape() as tape:
        y = wrapped(x, training=True)
        before = [float(loss) for loss in wrapped.losses]
    tape.gradient(y, wrapped.trainable_variables)
    assert before == [float(loss) for loss in wrapped.losses] == expected


def _many(keras: ModuleType) -> Any:
    class Many(keras.layers.Layer):  # type: ignore[name-defined]
        """Takes and returns nests, hands `training` down without taking it, and branches on a tensor."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.dense = _dense(keras, 4)
            self.normalization = keras.layers.BatchNormalization()

        def call(self, inputs: Any, scale: Any = None, *, flag: bool = False) -> Any:
            x = self.normalization(self.dense(inputs["a"])) + inputs["b"][0]
            if tf.reduce_sum(x) > 0:
                x = x * 2
            if scale is not None:
                x = x * scale
            ids = tf.argmax(x, -1)
            return {"x": x, "ids": ids, "none": None, "pair": (x + 1 if flag else x, inputs["b"][1])}

    return Many


@pytest.mark.parametrize("compiled", [_eager, tf.function], ids=["eager", "graph"])
@for_every_keras2
@pytest.mark.usefixtures("same_rounding")
def test_nested_arguments_and_results(keras: ModuleType, compiled: Any) -> None:
    many = _many(keras)
    plain, wrapped = many(name="many"), tfmp.Recompute(many(name="many"))
    x = tf.constant(_batch()[0])

    def results(layer: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer({"a": x, "b": [x * 2, tf.range(3)]}, tf.constant(3.0), flag=True, training=True)
            loss = tf.reduce_sum(out["x"] ** 2) + tf.reduce_sum(out["pair"][0] ** 3)
        grads = tape.gradient(loss, [x, *layer.trainable_variables])
        return [out["x"], out["ids"], *out["pair"], *grads], out["none"]

    (ours, none), (expected, _) = (compiled(lambda each=layer: results(each))() for layer in (wrapped, plain))
    assert none is None
    _assert_equal(ours, expected, rtol=1e-6)
    _assert_equal(wrapped.get_weights(), plain.get_weights(), rtol=1e-6)
    assert _names(wrapped) == _names(plain)


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


@in_every_mode
@for_every_keras2
def test_random_ops_that_keep_their_own_state_are_refused_in_training(keras: ModuleType, mode: dict[str, bool]) -> None:
    dropout = keras.layers.Dropout(0.5, rng_type="legacy_stateful", name="my_dropout")
    block = keras.Sequential([_dense(keras, 4), dropout], name="my_block")
    model = _model(keras, tfmp.Recompute(block), **mode)
    x, y = _batch()
    assert model.predict(x, verbose=0).shape == (8, 1)
    model.evaluate(x, y, verbose=0)
    with pytest.raises(
        ValueError, match=r"the layer 'my_block'.* training=True.*my_dropout.*enable_tf_random_generator"
    ):
        model.fit(x, y, verbose=0)


@for_every_keras2
def test_dynamic_layer_is_refused(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match="'slow' is dynamic"):
        tfmp.Recompute(keras.layers.Layer(dynamic=True, name="slow"))


@for_every_keras2
def test_wrapper_around_a_wrapper_and_what_is_no_layer_are_refused(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"is a tfmp\.Recompute already"):
        tfmp.Recompute(tfmp.Recompute(_dense(keras, 1)))
    with pytest.raises(TypeError, match="must be a layer or model of Keras"):
        tfmp.Recompute(keras.activations.relu)


@for_every_keras2
def test_without_a_tape_the_block_is_called_once(keras: ModuleType) -> None:
    calls = []

    class Counted(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: Any) -> Any:
            calls.append(1)
            return x * 2

    wrapped = tfmp.Recompute(Counted())
    wrapped(tf.ones([1]))
    assert len(calls) == 1


@for_every_keras2
def test_checkpoint_fits_with_recomputation_and_without(keras: ModuleType, tmp_path: Path) -> None:
    plain = _model(keras, _normalized(keras, "float32"))
    ours = _model(keras, tfmp.Recompute(_normalized(keras, "float32")))
    _fit(plain)
    path = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).save(tmp_path / "plain")
    ours.optimizer.build(ours.trainable_variables)
    tf.train.Checkpoint(model=ours, optimizer=ours.optimizer).restore(path).assert_consumed()
    _assert_equal(ours.get_weights(), plain.get_weights())
    _assert_equal(_fit(ours), _fit(plain), rtol=1e-6)
    path = tf.train.Checkpoint(model=ours, optimizer=ours.optimizer).save(tmp_path / "ours")
    plain.set_weights([0 * weight for weight in plain.get_weights()])
    tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).restore(path).assert_consumed()
    _assert_equal(ours.get_weights(), plain.get_weights())


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
@pytest.mark.parametrize("file", ["model.keras", "model.h5", "saved_model"])
@for_every_keras2
def test_saved_model_goes_on(keras: ModuleType, tmp_path: Path, file: str) -> None:
    model = _model(keras, tfmp.Recompute(_normalized(keras, "float32")))
    _fit(model)
    model.save(tmp_path / file)
    loaded = keras.models.load_model(tmp_path / file)
    assert isinstance(loaded.layers[1], tfmp.Recompute)
    _assert_equal(loaded.get_weights(), model.get_weights())
    x = _batch()[0]
    _assert_equal([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])
    # Keras 2 restores no Adam from a SavedModel, with recomputation or without.
    if file != "saved_model":
        _assert_equal(_fit(loaded), _fit(model), rtol=1e-6)


@for_every_keras2
def test_legacy_weights_fit_with_recomputation_and_without(keras: ModuleType, tmp_path: Path) -> None:
    plain = _model(keras, _normalized(keras, "float32"))
    ours = _model(keras, tfmp.Recompute(_normalized(keras, "float32")))
    _fit(plain)
    plain.save_weights(tmp_path / "weights.h5")
    ours.load_weights(tmp_path / "weights.h5")
    _assert_equal(ours.get_weights(), plain.get_weights())


# Keras 3 passes its variables to h5py, which requests a copy from NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@for_every_keras()
def test_saved_model_loads_in_a_new_process_that_imports_only_tfmp(keras: ModuleType, tmp_path: Path) -> None:
    inputs = keras.Input([4])
    block = keras.Sequential([_dense(keras, 4)], name="block")
    model = keras.Model(inputs, tfmp.Recompute(block)(inputs))
    model.save(tmp_path / "model.keras")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(tfmp.__file__).parent.parent)!r})\n"
        f"import tfmp, {keras.__name__} as keras\n"
        f"model = keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        "print(type(model.layers[1]).__name__, float(abs(model.get_weights()[0]).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["Recompute", str(float(abs(model.get_weights()[0]).sum()))], done.stderr


@for_every_keras2
def test_copies_are_independent(keras: ModuleType) -> None:
    block = tfmp.Recompute(_normalized(keras, "float32"), name="mine", trainable=False)
    model = _model(keras, block)
    for clone in (type(block).from_config(block.get_config()), keras.models.clone_model(model).layers[1]):
        assert clone.name == "mine"
        assert clone.layer is not block.layer
        assert not clone.trainable
    block.trainable = True
    x = tf.constant(_batch()[0])
    with tf.GradientTape():
        block(x, training=True)
    copied = copy.deepcopy(block)
    before = block.get_weights()
    with tf.GradientTape() as tape:
        y = copied(x, training=True)
    tape.gradient(y, copied.trainable_variables)
    _assert_equal(block.get_weights(), before)
    assert np.any(copied.get_weights()[3] != before[3])


def _stack(keras: ModuleType) -> Any:
    inputs = keras.Input([4])
    shared = _dense(keras, 4, "relu", name="shared")
    x = shared(inputs)
    encoder_inputs = keras.Input([4])
    encoded = encoder_inputs
    for index in range(2):
        encoded = _normalized(keras, "float32")(encoded) if index else _dense(keras, 4, "gelu", name="layer_0")(encoded)
    x = keras.Model(encoder_inputs, encoded, name="encoder")(x) * 2.0
    model = keras.Model(inputs, _dense(keras, 1, name="head")(shared(x) + x))
    model.compile(optimizer(keras, "Adam", learning_rate=0.01), "mse", metrics=["mae"])
    return model


@for_every_keras2
def test_recompute_layers_of_a_functional_model(keras: ModuleType) -> None:
    plain, given = _stack(keras), _stack(keras)
    ours = tfmp.recompute_layers(given, "shared", r"encoder/(layer_\d|block)")
    kinds = {layer.name: type(layer).__name__ for layer in [*ours.layers, *ours.get_layer("encoder").layers]}
    assert (kinds["shared"], kinds["layer_0"], kinds["block"], kinds["head"]) == (*["Recompute"] * 3, "Dense")
    assert ours.optimizer is given.optimizer
    assert [weight.name for weight in ours.weights] == [weight.name for weight in given.weights]
    expected = _fit(plain)
    _assert_equal(_fit(ours), expected, rtol=1e-6)
    _assert_equal(given.get_weights(), expected[1:], rtol=1e-6)


@for_every_keras2
def test_recompute_layers_of_a_sequential_model(keras: ModuleType) -> None:
    def make() -> Any:
        layers = [_dense(keras, 4, "tanh", name=f"hidden_{index}") for index in range(3)]
        model = keras.Sequential([keras.Input([4]), *layers, _dense(keras, 1)])
        model.compile(optimizer(keras, "Adam", learning_rate=0.01), "mse")
        return model

    plain, ours = make(), tfmp.recompute_layers(make(), r"hidden_\d")
    assert [type(layer).__name__ for layer in ours.layers] == [*["Recompute"] * 3, "Dense"]
    _assert_equal(_fit(ours), _fit(plain), rtol=1e-6)


@for_every_keras2
def test_recompute_layers_of_a_loaded_model(keras: ModuleType, tmp_path: Path) -> None:
    model = _stack(keras)
    _fit(model)
    model.save(tmp_path / "model.keras")
    ours = tfmp.recompute_layers(keras.models.load_model(tmp_path / "model.keras"), "encoder")
    _assert_equal(_fit(ours), _fit(model), rtol=1e-6)


@for_every_keras2
def test_recompute_layers_refuses_a_pattern_without_a_match(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"'layer_9' matches none of the model's layers: .*shared, encoder, encoder/"):
        tfmp.recompute_layers(_stack(keras), "layer_9")


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
