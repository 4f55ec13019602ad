"""recompute_layers of models of every Keras: which layers are computed again, how they train, and all their files."""

import functools
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from keras_models import assert_close, data, dense, fitted, is_keras3, plain, raw, stateful_block, values
from kerases import for_every_keras

import tfmp

pytestmark = pytest.mark.usefixtures("same_rounding")

#: The names of the layers of `_noting` that were called.
_CALLED: list[str] = []


@functools.cache
def _noting_class(keras: ModuleType) -> Any:
    @keras.saving.register_keras_serializable(package="test_recompute_layers")
    class Noting(keras.layers.Dense):  # type: ignore[name-defined]
        def call(self, x: Any) -> Any:
            _CALLED.append(self.name)
            return super().call(x)

    return Noting


def _noting(keras: ModuleType, units: int, name: str, **settings: Any) -> Any:
    """Make a Dense layer that tells when it is called."""
    initializer = keras.initializers.GlorotUniform(seed=units)
    return _noting_class(keras)(units, name=name, kernel_initializer=initializer, **settings)


def _loaded(keras: ModuleType, path: Path) -> Any:
    # Wrappers of Keras 2 do not find a layer by the name that it is registered under.
    with keras.saving.custom_object_scope({"Noting": _noting_class(keras)}):
        return keras.models.load_model(path)


def _called_again(model: Any) -> set[str]:
    """Return the layers that are called again while gradients are computed in eager code."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(data()[0], training=True) ** 2)
        _CALLED.clear()
    tape.gradient(loss, raw(model.trainable_variables))
    return set(_CALLED)


def _functional(keras: ModuleType) -> Any:
    """Make a model that contains a model of three layers, the first of which is called twice."""
    hidden = inner = keras.Input([8], name="hidden")
    for layer in (first := _noting(keras, 8, "layer_0", activation="relu"), first, _noting(keras, 8, "layer_1")):
        hidden = layer(hidden)
    encoder = keras.Model(inner, hidden, name="encoder")
    inputs = keras.Input([8], name="inputs")
    block = keras.Sequential([_noting(keras, 4, "up", activation="tanh"), _noting(keras, 8, "down")], name="block")
    return keras.Model(inputs, _noting(keras, 1, "head")(block(encoder(inputs)) * 2.0), name="net")


def _sequential(keras: ModuleType) -> Any:
    layers = [_noting(keras, 4, f"hidden_{index}", activation="tanh") for index in range(3)]
    return keras.Sequential([keras.Input([8]), *layers, _noting(keras, 1, "head")])


@pytest.mark.parametrize(
    ("make", "patterns", "expected"),
    [
        (_functional, [r"encoder/layer_\d"], {"layer_0", "layer_1"}),
        (_functional, ["encoder"], {"layer_0", "layer_1"}),
        (_functional, ["encoder", "encoder/layer_0"], {"layer_0", "layer_1"}),
        (_functional, ["block/up", "encoder/layer_1"], {"layer_1", "up"}),
        (_functional, [r".*/layer_0", "block"], {"layer_0", "up", "down"}),
        (_sequential, [r"hidden_\d"], {"hidden_0", "hidden_1", "hidden_2"}),
    ],
)
@for_every_keras()
def test_layers_whose_whole_path_matches_are_recomputed(
    keras: ModuleType, make: Any, patterns: list[str], expected: set[str]
) -> None:
    model, x = make(keras), data()[0]
    assert _called_again(model) == set()
    outputs, weights = model(x), [id(weight) for weight in model.weights]
    recomputed = tfmp.recompute_layers(model, *patterns)
    assert _called_again(recomputed) == expected
    assert [id(weight) for weight in recomputed.weights] == weights
    assert_close(recomputed(x), outputs, 0)


@pytest.mark.parametrize(("make", "pattern"), [(_functional, "encoder"), (_sequential, r"hidden_\d")])
@for_every_keras()
def test_compiled_and_loaded_models_train_on_as_without_recomputation(
    keras: ModuleType, make: Any, pattern: str, tmp_path: Path
) -> None:
    model, plain = make(keras), make(keras)
    for each in (model, plain):
        fitted(each, keras.optimizers.Adam(0.01), jit_compile=False)
    optimizer = model.optimizer
    recomputed = tfmp.recompute_layers(model, pattern)
    assert recomputed.optimizer is optimizer
    plain.save(tmp_path / "plain.keras")
    recomputed.save(tmp_path / "recomputed.keras")
    loaded = _loaded(keras, tmp_path / "recomputed.keras")
    again = tfmp.recompute_layers(_loaded(keras, tmp_path / "plain.keras"), pattern)
    assert _called_again(recomputed) == _called_again(loaded) == _called_again(again) != set()
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(*data(), **settings).history["loss"]
    for each in (recomputed, loaded, again):
        assert each.fit(*data(), **settings).history["loss"] == pytest.approx(expected, rel=1e-6)
        assert_close(values(each), values(plain), 1e-6)
    assert int(optimizer.iterations) == 12


def _encoder_class(keras: ModuleType) -> Any:
    @keras.saving.register_keras_serializable(package="test_recompute_layers")
    class Encoder(keras.Model):  # type: ignore[name-defined]
        """Makes its graph itself, as the backbones of keras-hub do."""

        def __init__(self, width: int, name: str = "encoder") -> None:
            blocks = [_noting(keras, width, f"block_{index}") for index in range(2)]
            hidden = inputs = keras.Input([8])
            for block in blocks:
                hidden = block(hidden)
            super().__init__(inputs, hidden, name=name)
            self.width, self.blocks = width, blocks

        def get_config(self) -> dict[str, Any]:
            return {"width": self.width, "name": self.name}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls(**config)

    return Encoder


def _task(keras: ModuleType) -> Any:
    @keras.saving.register_keras_serializable(package="test_recompute_layers")
    class Task(keras.Model):  # type: ignore[name-defined]
        """Trains in a way of its own and holds its encoder, as the tasks of keras-hub do."""

        def __init__(self, encoder: Any, offset: float = 1000.0) -> None:
            inputs = keras.Input([8])
            super().__init__(inputs, _noting(keras, 1, "head")(encoder(inputs)))
            self.encoder, self.offset, self.parts = encoder, offset, {"encoders": [encoder]}
            self.batches = keras.metrics.Sum(name="batches")

        def train_step(self, data: Any) -> Any:
            self.batches.update_state(1.0)
            logs = super().train_step(data)
            return {**logs, "total": logs["loss"] + self.offset}

        def get_config(self) -> dict[str, Any]:
            return {"encoder": keras.saving.serialize_keras_object(self.encoder), "offset": self.offset}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls(keras.saving.deserialize_keras_object(config["encoder"]), config["offset"])

    model = Task(_encoder_class(keras)(4))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=True)
    return model


@for_every_keras()
def test_task_of_an_own_class_trains_encodes_and_is_saved_as_without_recomputation(
    keras: ModuleType, tmp_path: Path
) -> None:
    model, given = _task(keras), _task(keras)
    recomputed = tfmp.recompute_layers(given, r"encoder/block_\d", "head")
    assert recomputed.optimizer is given.optimizer
    settings = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected, found = (each.fit(*data(), **settings).history for each in (model, recomputed))
    assert found["total"][0] > 1000
    assert_close(found.values(), expected.values(), 1e-6)
    x = data()[0]
    assert_close([*recomputed.get_weights(), recomputed.encoder(x)], [*model.get_weights(), model.encoder(x)], 1e-6)
    recomputed.save(tmp_path / "task.keras")
    loaded = keras.models.load_model(tmp_path / "task.keras")
    for each in (recomputed, loaded):
        assert _called_again(each) == {"block_0", "block_1", "head"}
        assert _called_again(each.encoder) == {"block_0", "block_1"}
        assert each.parts["encoders"][0] is each.encoder
        assert (each.offset, each.encoder.width) == (1000.0, 4)
    assert isinstance(recomputed, type(given))
    assert isinstance(recomputed.encoder, type(given.encoder))
    assert_close([loaded.encoder(x), *loaded.get_weights()], [recomputed.encoder(x), *recomputed.get_weights()], 0)
    states = (each.optimizer.variables for each in (loaded, recomputed))
    assert_close(*(map(tf.convert_to_tensor, each() if callable(each) else each) for each in states), 0)


@for_every_keras()
@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_class_that_only_trains_in_its_own_way_keeps_what_was_set_on_the_model(keras: ModuleType, kind: str) -> None:
    class Offset:
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)  # type: ignore[misc]
            return {**logs, "total": logs["loss"] + self.offset}  # type: ignore[attr-defined]

    layers, inputs = [_noting(keras, 3, "block"), _noting(keras, 1, "head")], keras.Input([8])
    own = type("Own", (Offset, keras.Model if kind == "functional" else keras.Sequential), {})
    model = own(inputs, layers[1](layers[0](inputs))) if kind == "functional" else own([inputs, *layers])
    model.offset = 500.0
    # A function without a name cannot be written to a configuration.
    model.compile("sgd", lambda y, output: (y - output) ** 2, run_eagerly=True)
    recomputed = tfmp.recompute_layers(tfmp.recompute_layers(model, "block"), "head")
    assert _called_again(recomputed) == {"block", "head"}
    assert isinstance(recomputed, type(model))
    assert recomputed.fit(*data(), verbose=0).history["total"][0] > 500


@for_every_keras()
def test_optimizer_that_keras_wrapped_is_kept_without_a_warning(keras: ModuleType) -> None:
    with tfmp.precision("O2"):
        inputs = keras.Input([4])
        model = keras.Model(inputs, dense(keras, 1)(dense(keras, 4, name="block")(inputs)))
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recomputed = tfmp.recompute_layers(model, "block")
        assert recomputed.optimizer is model.optimizer
        # The model computes in float16 as before, so that Keras wraps the next optimizer too.
        recomputed.compile("sgd", "mse")
    assert type(recomputed.optimizer).__name__ == type(model.optimizer).__name__


@for_every_keras()
def test_frozen_model_stays_frozen(keras: ModuleType) -> None:
    encoder = _encoder_class(keras)(4)
    inputs = keras.Input([8])
    model = keras.Model(inputs, dense(keras, 1, name="head")(encoder(inputs)))
    encoder.trainable = False
    encoder.blocks[0].trainable = True
    trainable = [id(each) for each in model.trainable_weights]
    recomputed = tfmp.recompute_layers(model, "encoder/block_0")
    assert [id(each) for each in recomputed.trainable_weights] == trainable
    assert not recomputed.get_layer("encoder").trainable


def _net(keras: ModuleType, wrap: Any) -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input([8])
    # Keras saves no seeds.
    net = keras.Model(inputs, dense(keras, 1)(wrap(stateful_block(keras, rate=0))(inputs)), name="net")
    net.compile(keras.optimizers.Adam(0.01), "mse")
    net.optimizer.build(net.trainable_variables)
    return net


@pytest.mark.parametrize("form", ["checkpoint", "weights.h5"])
@pytest.mark.parametrize("wraps", [(plain, tfmp.Recompute), (tfmp.Recompute, plain)], ids=["to", "from"])
@for_every_keras()
def test_weights_fit_the_model_with_recomputation_and_without(
    keras: ModuleType, wraps: Any, form: str, tmp_path: Path
) -> None:
    if form == "weights.h5" and is_keras3(keras):
        pytest.skip("Keras 3 writes such files by the layers' own places in the model")
    saved, restored = (_net(keras, wrap) for wrap in wraps)
    fitted(saved, saved.optimizer)
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer).save(tmp_path / "saved")
        tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(path).assert_consumed()
        assert_close(map(tf.convert_to_tensor, restored.optimizer.variables), saved.optimizer.variables, 0)
    else:
        saved.save_weights(tmp_path / "weights.h5")
        restored.load_weights(tmp_path / "weights.h5")
    assert_close(restored.get_weights(), saved.get_weights(), 0)


@pytest.mark.parametrize("file", ["model.keras", "model.h5", "saved_model"])
@for_every_keras()
def test_saved_model_goes_on(keras: ModuleType, file: str, tmp_path: Path) -> None:
    if is_keras3(keras) and file != "model.keras":
        pytest.skip("Keras 3 saves models in its own files")
    net = _net(keras, tfmp.Recompute)
    fitted(net, net.optimizer)
    net.save(tmp_path / file)
    loaded = keras.models.load_model(tmp_path / file)
    assert isinstance(loaded.layers[1], tfmp.Recompute)
    x = data()[0]
    assert_close([*values(loaded), loaded.predict(x, verbose=0)], [*values(net), net.predict(x, verbose=0)], 0)
    # Keras 2 restores no Adam from a SavedModel, with recomputation or without.
    if file != "saved_model":
        assert fitted(loaded, loaded.optimizer) == pytest.approx(fitted(net, net.optimizer), rel=1e-6)


@for_every_keras()
def test_saved_model_loads_in_a_new_process_that_imports_only_tfmp(keras: ModuleType, tmp_path: Path) -> None:
    net = keras.Sequential([keras.Input([4]), tfmp.Recompute(dense(keras, 4, name="block"))])
    net.save(tmp_path / "model.keras")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(tfmp.__file__).parent.parent)!r})\n"
        f"import tfmp, {keras.__name__} as keras\n"
        f"model = keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        "print(type(model.layers[-1]).__name__, float(abs(model.get_weights()[0]).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["Recompute", str(float(abs(net.get_weights()[0]).sum()))], done.stderr
