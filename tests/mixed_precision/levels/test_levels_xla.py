"""Layers that TensorFlow or XLA cannot compute in half precision train at each level, also where XLA compiles them."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import policy

import tfmp
from tfmp.hosts.keras.which import is_keras2

_IMAGES = np.cos(np.arange(96, dtype=np.float32)).reshape(2, 4, 4, 3)

#: What resizes images, by the name of its class. XLA cannot compile what Keras 2 does to images that are too small.
_RESIZING: dict[str, Callable[[ModuleType], Any]] = {
    "UpSampling2D": lambda keras: keras.layers.UpSampling2D(2, interpolation="bilinear"),
    "Resizing": lambda keras: keras.layers.Resizing(6, 5),
    "CenterCrop": lambda keras: keras.layers.CenterCrop(*((3, 2) if is_keras2(keras) else (5, 6))),
    "RandomCrop": lambda keras: keras.layers.RandomCrop(*((4, 4) if is_keras2(keras) else (5, 6))),
}


def _gradient(layer: Any, kernel: tf.Variable) -> tf.Tensor:
    """Return the gradient of a loss behind a layer for what is in front of it, as XLA compiles it."""

    @tf.function(jit_compile=True)
    def gradient() -> tf.Tensor:
        half = layer.compute_dtype if layer.compute_dtype != "float32" else "float16"
        with tf.GradientTape() as tape:
            images = tf.cast(_IMAGES * kernel, half)
            loss = tf.reduce_sum(tf.cast(tf.nn.relu(layer(tf.nn.relu(images), training=True)), tf.float32))
        return tape.gradient(loss, kernel)

    return gradient()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O2-bfloat16"])
@pytest.mark.parametrize("name", _RESIZING)
@for_every_keras()
def test_layer_that_resizes_trains_in_a_compiled_step(keras: ModuleType, name: str, level: str) -> None:
    with tfmp.precision(level):
        made = _RESIZING[name](keras)
    given = _RESIZING[name](keras)
    tfmp.set_precision(given, level)
    assert policy(made) == policy(given) == "float32"
    kernel = tf.Variable(2.0)
    expected = _gradient(_RESIZING[name](keras), kernel)
    np.testing.assert_allclose(_gradient(given, kernel), expected, rtol=2e-2)


@for_every_keras()
def test_nearest_pixels_are_half(keras: ModuleType) -> None:
    for make in (lambda: keras.layers.UpSampling2D(2), lambda: keras.layers.Resizing(2, 2, interpolation="nearest")):
        with tfmp.precision("O2"):
            made = make()
        given = make()
        tfmp.set_precision(given, "O2")
        assert policy(made) == policy(given) == "mixed_float16"


@for_every_keras()
def test_subclass_that_fixes_the_interpolation_is_kept(keras: ModuleType) -> None:
    class Up(keras.layers.UpSampling2D):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(2, interpolation="bilinear")

    with tfmp.precision("O2"):
        assert policy(Up()) == "float32"


@for_every_keras()
def test_model_that_upsamples_trains_with_fit(keras: ModuleType) -> None:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([4, 4, 3]),
            layers.Dense(2, "relu"),
            layers.UpSampling2D(2, interpolation="bilinear", name="up"),
            layers.Dense(1),
        ]
    )
    report = tfmp.set_precision(model, "O2")
    assert {layer.name: layer.reason for layer in report.layers}["up"] == "O2 keeps it in float32"
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    history = model.fit(_IMAGES, np.zeros([2, 8, 8, 1]), epochs=2, verbose=0).history["loss"]
    assert history[1] < history[0]


@pytest.mark.parametrize("level", ["O2-bfloat16", "O3-bfloat16"])
@pytest.mark.parametrize("name", ["RandomRotation", "RandomZoom", "RandomTranslation"])
@for_every_keras()
def test_projection_of_images_stays_in_float32_at_levels_of_bfloat16(keras: ModuleType, name: str, level: str) -> None:
    factors = (0.2, 0.2) if name == "RandomTranslation" else (0.2,)
    with tfmp.precision(level):
        layer = getattr(keras.layers, name)(*factors)
    assert layer(tf.cast(_IMAGES, tf.bfloat16), training=True).dtype == tf.float32
    with tfmp.precision(level.removesuffix("-bfloat16")):
        assert policy(getattr(keras.layers, name)(*factors)) != "float32"


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O3-bfloat16"])
@for_every_keras()
def test_what_counts_stays_in_float32(keras: ModuleType, level: str) -> None:
    with tfmp.precision(level):
        counting = keras.layers.CategoryEncoding(4, output_mode="count")
        binned = keras.layers.Discretization([0.5], output_mode="count")
    assert counting(np.array([[1, 1, 3]])).numpy().tolist() == [[0, 2, 0, 1]]
    assert binned(np.array([[0.0, 1.0, 1.0]], np.float32)).numpy().tolist() == [[1, 2]]
