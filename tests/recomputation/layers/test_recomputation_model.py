"""recompute_layers: which layers are wrapped, what the new model shares, and how it is saved."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

from keras_blocks import data, fitted, layers, plain, stateful_block, values

import tfmp

pytestmark = [
    pytest.mark.essential,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


def _net() -> keras.Model:
    """Return a model that contains a model of three layers, the first of which is called twice."""
    keras.utils.set_random_seed(0)
    hidden = inner = keras.Input([8], name="hidden")
    for layer in (first := layers.Dense(8, "relu", name="layer_0"), first, layers.Dense(8, name="layer_1")):
        hidden = layer(hidden)
    encoder = keras.Model(inner, hidden, name="encoder")
    inputs = keras.Input([8], name="inputs")
    return keras.Model(inputs, layers.Dense(1, name="head")(stateful_block("block")(encoder(inputs))), name="net")


def _wrapped(model: keras.Model) -> list[str]:
    """Return the paths of the layers that are recomputed."""
    found = []
    for layer in model.layers:
        if isinstance(layer, tfmp.Recompute):
            found.append(layer.name)
        elif hasattr(layer, "layers"):
            found += [f"{layer.name}/{path}" for path in _wrapped(layer)]
    return found


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([r"encoder/layer_\d"], ["encoder/layer_0", "encoder/layer_1"]),
        (["encoder"], ["encoder"]),
        (["encoder", "encoder/layer_0"], ["encoder"]),
        (["block/up", "encoder/layer_1"], ["encoder/layer_1", "block/up"]),
        ([r".*/layer_0", "block"], ["encoder/layer_0", "block"]),
    ],
)
def test_layers_whose_whole_path_matches_are_wrapped(patterns: list[str], expected: list[str]) -> None:
    model = _net()
    recomputed = tfmp.recompute_layers(model, *patterns)
    assert _wrapped(recomputed) == expected
    assert _wrapped(model) == []
    np.testing.assert_array_equal(recomputed(data()[0]), model(data()[0]))
    assert {id(variable) for variable in recomputed.variables} == {id(variable) for variable in model.variables}


def test_sequential_model_that_is_compiled_keeps_its_optimizer() -> None:
    model = fitted(keras.Sequential([keras.Input([8]), stateful_block(), layers.Dense(1)]), keras.optimizers.Adam(0.01))
    recomputed = tfmp.recompute_layers(model, "block")
    assert recomputed.optimizer is model.optimizer
    recomputed.fit(*data(), batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 9


@pytest.mark.usefixtures("same_rounding")
def test_training_is_that_of_the_model() -> None:
    model, recomputed = _net(), tfmp.recompute_layers(_net(), "encoder/layer_.", "block")
    for expected, got in zip(values(fitted(model)), values(fitted(recomputed)), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("wraps", [(plain, tfmp.Recompute), (tfmp.Recompute, plain)])
def test_checkpoint_fits_the_model_with_recomputation_and_without(wraps: tuple, tmp_path: Path) -> None:
    saved, restored = (
        keras.Sequential([keras.Input([8]), wrap(stateful_block()), layers.Dense(1)], name="net") for wrap in wraps
    )
    fitted(saved, keras.optimizers.Adam(0.01))
    restored.compile(keras.optimizers.Adam(0.01), "mse")
    restored.optimizer.build(restored.trainable_variables)
    path = tf.train.Checkpoint(model=saved).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=restored).restore(path).assert_consumed()
    for expected, got in zip(saved.weights, restored.weights, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_saved_model_loads_with_its_recomputed_layers(tmp_path: Path) -> None:
    model = fitted(tfmp.recompute_layers(_net(), "encoder/layer_0", "block"))
    model.save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras")
    assert _wrapped(loaded) == ["encoder/layer_0", "block"]
    np.testing.assert_array_equal(loaded.predict(data()[0], verbose=0), model.predict(data()[0], verbose=0))
    plain_model = _net()
    plain_model.save(tmp_path / "plain.keras")
    loaded_plain = keras.models.load_model(tmp_path / "plain.keras")
    assert [variable.path for variable in loaded.weights] == [variable.path for variable in loaded_plain.weights]
    assert _wrapped(keras.models.clone_model(model)) == ["encoder/layer_0", "block"]
    loaded.save_weights(tmp_path / "net.weights.h5")
    model.load_weights(tmp_path / "net.weights.h5")


def test_pattern_that_matches_nothing_lists_the_layers() -> None:
    with pytest.raises(
        ValueError, match=r"'layer_0' matches none of the model's layers: encoder, encoder/layer_0, encoder/layer_1, bl"
    ):
        tfmp.recompute_layers(_net(), "encoder", "layer_0")
    with pytest.raises(
        ValueError, match=r"pass a pattern for the layers to recompute; the model's layers are encoder,"
    ):
        tfmp.recompute_layers(_net())
    with pytest.raises(TypeError, match="patterns must be a list of regular expressions, and it holds 3 of type int"):
        tfmp.recompute_layers(_net(), 3)


def test_models_that_cannot_be_rebuilt_are_refused() -> None:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="subclassed")
            self.dense = layers.Dense(1, name="dense")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.dense(x)

    with pytest.raises(
        TypeError, match=r"model 'subclassed' is a Net, which is subclassed and cannot be rebuilt: wrap"
    ):
        tfmp.recompute_layers(Net(), "dense")
    with pytest.raises(TypeError, match="model must be a model of Keras, got 'net' of type str"):
        tfmp.recompute_layers("net", "dense")
