"""recompute_layers of models of a class of one's own: the class, its attributes, its training step and its files."""

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kerases import for_every_keras, optimizer

import tfmp

_X, _Y = np.ones([8, 4], np.float32), np.ones([8, 1], np.float32)


def _dense(keras: ModuleType, units: int, name: str, **settings: Any) -> Any:
    initializer = keras.initializers.GlorotUniform(seed=units)
    return keras.layers.Dense(units, name=name, kernel_initializer=initializer, **settings)


def _encoder_class(keras: ModuleType) -> Any:
    @keras.saving.register_keras_serializable(package="test_same_class")
    class Encoder(keras.Model):  # type: ignore[name-defined]
        """Makes its graph itself, as the backbones of keras-hub do."""

        def __init__(self, width: int, name: str = "encoder") -> None:
            blocks = [_dense(keras, width, f"block_{index}") for index in range(2)]
            hidden = inputs = keras.Input([4])
            for block in blocks:
                hidden = block(hidden)
            super().__init__(inputs, hidden, name=name)
            self.width = width
            self.blocks = blocks

        def get_config(self) -> dict[str, Any]:
            return {"width": self.width, "name": self.name}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls(**config)

    return Encoder


def _task_class(keras: ModuleType) -> Any:
    @keras.saving.register_keras_serializable(package="test_same_class")
    class Task(keras.Model):  # type: ignore[name-defined]
        """Trains in a way of its own and holds its encoder, as the tasks of keras-hub do."""

        def __init__(self, encoder: Any, offset: float = 1000.0) -> None:
            inputs = keras.Input([4])
            super().__init__(inputs, _dense(keras, 1, "head")(encoder(inputs)))
            self.encoder = encoder
            self.parts = {"encoders": [encoder]}
            self.offset = offset
            self.batches = keras.metrics.Sum(name="batches")

        def fit(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            # What a preprocessor would do with strings.
            return super().fit(np.stack([np.full([4], len(text), np.float32) for text in x]), *args, **kwargs)

        def train_step(self, data: Any) -> Any:
            self.batches.update_state(1.0)
            logs = super().train_step(data)
            return {**logs, "total": logs["loss"] + self.offset}

        def encode(self, x: Any) -> Any:
            return self.encoder(x)

        def get_config(self) -> dict[str, Any]:
            return {"encoder": keras.saving.serialize_keras_object(self.encoder), "offset": self.offset}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls(keras.saving.deserialize_keras_object(config["encoder"]), config["offset"])

    return Task


def _task(keras: ModuleType) -> Any:
    model = _task_class(keras)(_encoder_class(keras)(4))
    model.compile(optimizer(keras, "Adam", learning_rate=0.01), "mse", metrics=["mae"], run_eagerly=True)
    return model


def _variables(opt: Any) -> list[Any]:
    return [variable.numpy() for variable in (opt.variables() if callable(opt.variables) else opt.variables)]


def _recomputed(model: Any) -> list[str]:
    return [layer.name for layer in model.layers if isinstance(layer, tfmp.Recompute)]


@for_every_keras()
def test_task_of_an_own_class_trains_and_encodes_as_without_recomputation(keras: ModuleType) -> None:
    model, given = _task(keras), _task(keras)
    recomputed = tfmp.recompute_layers(given, r"encoder/block_\d")
    assert isinstance(recomputed, type(given))
    assert isinstance(recomputed.encoder, type(given.encoder))
    assert _recomputed(recomputed.encoder) == ["block_0", "block_1"]
    assert recomputed.parts["encoders"][0] is recomputed.encoder is not given.encoder
    assert (recomputed.offset, recomputed.encoder.width) == (1000.0, 4)
    assert recomputed.optimizer is given.optimizer
    histories = [each.fit(["a", "abc"] * 4, _Y, epochs=2, verbose=0).history for each in (model, recomputed)]
    assert histories[0]["total"][0] > 1000
    for name in histories[0]:
        np.testing.assert_allclose(histories[1][name], histories[0][name], rtol=1e-6)
    for expected, got in zip(model.get_weights(), recomputed.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(recomputed.encode(_X).numpy(), model.encode(_X).numpy(), rtol=1e-6)


# Keras 3.15.1 warns so where it saves any Dense.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@for_every_keras()
def test_model_of_an_own_class_is_saved_and_loaded_with_its_recomputed_layers(
    keras: ModuleType, tmp_path: Path
) -> None:
    model = tfmp.recompute_layers(_task(keras), r"encoder/block_\d", "head")
    model.fit(["a", "abc"] * 4, _Y, verbose=0)
    model.save(tmp_path / "task.keras")
    loaded = keras.models.load_model(tmp_path / "task.keras")
    assert isinstance(loaded, _class_named(model, "Task"))
    assert (_recomputed(loaded), _recomputed(loaded.encoder)) == (["head"], ["block_0", "block_1"])
    np.testing.assert_array_equal(loaded.predict(_X, verbose=0), model.predict(_X, verbose=0))
    for expected, got in zip(_variables(model.optimizer), _variables(loaded.optimizer), strict=True):
        np.testing.assert_array_equal(got, expected)


def _class_named(model: Any, name: str) -> Any:
    return [each for each in type(model).__mro__ if each.__name__ == name][-1]


@for_every_keras()
@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_class_that_only_trains_in_its_own_way_keeps_what_was_set_on_the_model(keras: ModuleType, kind: str) -> None:
    class Offset:
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)  # type: ignore[misc]
            return {**logs, "total": logs["loss"] + self.offset}  # type: ignore[attr-defined]

    layers = [_dense(keras, 3, "block"), _dense(keras, 1, "head")]
    inputs = keras.Input([4])
    if kind == "functional":
        model = type("Own", (Offset, keras.Model), {})(inputs, layers[1](layers[0](inputs)))
    else:
        model = type("Own", (Offset, keras.Sequential), {})([inputs, *layers])
    model.offset = 500.0
    # A function without a name cannot be written to a configuration.
    model.compile("sgd", lambda y, output: (y - output) ** 2, run_eagerly=True)
    recomputed = tfmp.recompute_layers(tfmp.recompute_layers(model, "block"), "head")
    assert _recomputed(recomputed) == ["block", "head"]
    assert isinstance(recomputed, type(model))
    assert recomputed.fit(_X, _Y, verbose=0).history["total"][0] > 500


@for_every_keras()
def test_class_with_a_call_of_its_own_is_refused_by_name(keras: ModuleType) -> None:
    class Doubled(keras.Model):  # type: ignore[name-defined]
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return super().call(inputs, training, mask) * 2

    inputs = keras.Input([4])
    model = Doubled(inputs, _dense(keras, 1, "head")(inputs), name="net")
    with pytest.raises(
        TypeError, match=r"model 'net' is of the class Doubled and cannot .* a `call` of its own.* Wrap its layers"
    ):
        tfmp.recompute_layers(model, "head")


@for_every_keras()
def test_attribute_that_cannot_be_set_again_is_refused_by_name(keras: ModuleType) -> None:
    class Once(keras.Model):  # type: ignore[name-defined]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "limit" and value < 0:
                raise ValueError("limit is negative")
            super().__setattr__(name, value)

    inputs = keras.Input([4])
    model = Once(inputs, _dense(keras, 1, "head")(inputs), name="net")
    vars(model)["limit"] = -1
    with pytest.raises(TypeError, match=r"'net' is of the class Once .*: ValueError: limit is negative"):
        tfmp.recompute_layers(model, "head")


@for_every_keras()
def test_optimizer_that_keras_wrapped_is_kept_without_a_warning(keras: ModuleType) -> None:
    with tfmp.precision("O2"):
        inputs = keras.Input([4])
        model = keras.Model(inputs, _dense(keras, 1, "head")(_dense(keras, 4, "block")(inputs)))
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
    inputs = keras.Input([4])
    model = keras.Model(inputs, _dense(keras, 1, "head")(encoder(inputs)))
    encoder.trainable = False
    encoder.blocks[0].trainable = True
    recomputed = tfmp.recompute_layers(model, "encoder/block_0")
    assert [id(each) for each in recomputed.trainable_weights] == [id(each) for each in model.trainable_weights]
    assert not recomputed.get_layer("encoder").trainable
