"""The policies of layers at each level, when they are made and when they are set, and what layers then compute."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import CASES, POLICIES, outputs, policies, policy

import tfmp
from tfmp.any_keras.which import is_keras2

_X = CASES["sequential"].batch


def _subclass(keras: ModuleType, name: str, **fixed: Any) -> Any:
    """Return an object of a class of the user's, which passes on its settings."""

    class Own(getattr(keras.layers, name)):  # type: ignore[misc] # of any Keras
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **fixed, **settings)

    return Own


def _with_another_activation(keras: ModuleType) -> Any:
    def init(self: Any, activation: str = "relu") -> None:
        keras.layers.Dense.__init__(self, 2, activation="softmax")

    return type("Own", (keras.layers.Dense,), {"__init__": init})()


_AT_ALL = "O1 O2 O3 O2-bfloat16 O3-bfloat16"


def _named(name: str, **settings: Any) -> Callable[[ModuleType], Any]:
    return lambda keras: getattr(keras.layers, name)(**settings)


def _with_activation(name: str) -> dict[str, Callable[[ModuleType], Any]]:
    """Return layers that are given an activation in every way."""
    return {
        "Dense by place": lambda keras: keras.layers.Dense(2, name),
        "Dense": lambda keras: keras.layers.Dense(2, activation=name),
        "Dense of a function": lambda keras: keras.layers.Dense(2, getattr(keras.activations, name, name)),
        "Activation": lambda keras: keras.layers.Activation(name),
        "Activation of a function": lambda keras: keras.layers.Activation(
            activation=getattr(keras.activations, name, name)
        ),
        "layer in TimeDistributed": lambda keras: keras.layers.TimeDistributed(keras.layers.Dense(2, name)).layer,
        "class that passes it on": lambda keras: _subclass(keras, "Dense")(2, activation=name),
        "class that fixes it": lambda keras: _subclass(keras, "Dense", activation=name)(2),
    }


#: What makes a layer, and the levels that keep it in float32.
_LAYERS: dict[str, tuple[Callable[[ModuleType], Any], str]] = {
    **{
        name: (_named(name), "O1")
        for name in (
            *("Softmax", "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"),
            *("GroupNormalization", "UnitNormalization", "ActivityRegularization"),
        )
    },
    "Lambda": (lambda keras: keras.layers.Lambda(lambda x: x), "O1"),
    "class of the user's": (lambda keras: _subclass(keras, "GlobalAveragePooling1D")(), "O1"),
    "BatchNormalization": (_named("BatchNormalization"), ""),
    "LayerNormalization": (_named("LayerNormalization"), ""),
    "AveragePooling1D": (_named("AveragePooling1D", pool_size=2), ""),
    **{
        f"{name}, {kind}": (make, "O1" if name in ("softmax", "log_softmax", "exponential") else "")
        for name in ("softmax", "log_softmax", "exponential", "relu", "tanh")
        for kind, make in _with_activation(name).items()
    },
    "class whose own argument means nothing": (_with_another_activation, "O1"),
    "softmax of TensorFlow": (_named("Dense", units=2, activation=tf.nn.softmax), "O1"),
    "relu of TensorFlow": (_named("Dense", units=2, activation=tf.nn.relu), ""),
    "softmax layer": (lambda keras: keras.layers.Dense(2, activation=keras.layers.Softmax()), "O1"),
    "Normalization": (_named("Normalization", axis=None, mean=1.0, variance=4.0), "O1 O2 O2-bfloat16"),
    "CategoryEncoding": (_named("CategoryEncoding", num_tokens=4, output_mode="count"), _AT_ALL),
    "Discretization": (_named("Discretization", bin_boundaries=[0.5], output_mode="count"), _AT_ALL),
    "UpSampling2D": (_named("UpSampling2D", size=2, interpolation="bilinear"), _AT_ALL),
    **{name: (_named(name, height=5, width=6), _AT_ALL) for name in ("Resizing", "CenterCrop", "RandomCrop")},
    "nearest pixels": (_named("UpSampling2D", size=2), ""),
    "nearest pixels of a size": (_named("Resizing", height=2, width=2, interpolation="nearest"), ""),
    "class that fixes the interpolation": (
        lambda keras: _subclass(keras, "UpSampling2D", interpolation="bilinear")(2),
        _AT_ALL,
    ),
    "RandomRotation": (_named("RandomRotation", factor=0.2), "O2-bfloat16 O3-bfloat16"),
    "RandomZoom": (_named("RandomZoom", height_factor=0.2), "O2-bfloat16 O3-bfloat16"),
    "RandomTranslation": (_named("RandomTranslation", height_factor=0.2, width_factor=0.2), "O2-bfloat16 O3-bfloat16"),
}


@pytest.mark.parametrize("name", _LAYERS)
@for_every_keras()
def test_layer_has_the_same_policy_when_it_is_made_and_when_it_is_set(keras: ModuleType, name: str) -> None:
    make, kept = _LAYERS[name]
    activation = name.partition(",")[0]
    if "," in name and not hasattr(keras.activations, activation):
        pytest.skip(f"needs keras.activations.{activation}, which Keras {keras.__version__} does not have")
    for level in _AT_ALL.split():
        with tfmp.precision(level):
            made = make(keras)
        given = make(keras)
        tfmp.set_precision(given, level)
        assert policy(made) == policy(given) == ("float32" if level in kept.split() else POLICIES[level])
        assert policies(made) == policies(given)


@pytest.mark.parametrize("name", ["UpSampling2D", "Resizing", "CenterCrop"])
@for_every_keras()
def test_layer_that_resizes_has_its_gradient_within_xla(keras: ModuleType, name: str) -> None:
    # Images that are smaller are resized; XLA cannot compile how Keras 2 does that.
    images = tf.cast(tf.random.stateless_normal([2, 8, 8, 3] if is_keras2(keras) else [2, 4, 4, 3], [1, 2]), tf.float16)

    def gradient(layer: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            x = tf.nn.relu(images)
            tape.watch(x)
            loss = tf.reduce_sum(tf.cast(tf.nn.relu(layer(x, training=True)), tf.float32))
        return tape.gradient(loss, x)

    given = _LAYERS[name][0](keras)
    tfmp.set_precision(given, "O2")
    compiled = tf.function(lambda: gradient(given), jit_compile=True, autograph=False)
    np.testing.assert_allclose(compiled(), gradient(_LAYERS[name][0](keras)), rtol=2e-2, atol=2e-2)


@for_every_keras()
def test_layer_takes_along_what_it_holds_when_it_is_made_and_when_it_is_set(keras: ModuleType) -> None:
    class Own(keras.layers.MultiHeadAttention):  # type: ignore[name-defined] # of any Keras
        pass

    x = np.ones([2, 3, 4], np.float32)
    with tfmp.precision("O1"):
        made, lstm = Own(2, 2), keras.layers.LSTM(3, activation="softmax")
        island = keras.layers.MultiHeadAttention(2, 2, dtype="float32")
    made(x, x)
    island(x, x)
    assert {found for _, found, _, _ in policies(made)} == {"mixed_float16"}
    assert {found for _, found, _, _ in policies(island)} == {"float32"}
    layer, other = Own(2, 2), keras.layers.LSTM(3, activation="softmax")
    layer(x, x)
    for each in (layer, other):
        tfmp.set_precision(each, "O1")
    assert [each for _, *each in policies(layer)] == [each for _, *each in policies(made)]
    assert [policy(each) for each in (lstm, lstm.cell, other, other.cell)] == ["float32"] * 4


@for_every_keras()
def test_weights_in_containers_and_weights_that_are_not_trained_are_cast(keras: ModuleType) -> None:
    class Weights(NamedTuple):
        kernel: Any
        bias: Any

    class Own(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            ones = {"shape": [3], "initializer": "ones"}
            self.pair = Weights(*(self.add_weight(**ones, name=name) for name in ("k", "b")))
            self._scales = [self.add_weight(**ones, name="scale")]
            self.nested = {"all": [self.add_weight(**ones, name="inner", trainable=False)]}

        def call(self, x: Any) -> Any:
            return (x * self.pair.kernel + self.pair.bias) * self._scales[0] + self.nested["all"][0]

    layer = Own()
    before = outputs(layer, _X)
    with tfmp.precision("O2"):
        made = Own()
    tfmp.set_precision(layer, "O2")
    assert outputs(layer, _X) == outputs(made, _X) != before
    tfmp.set_precision(layer, "O0")
    assert outputs(layer, _X) == before


def _with_added_losses(keras: ModuleType) -> Any:
    """Return a model with a loss that a layer adds, a regularized result and regularized weights."""

    class _Adding(keras.layers.Layer):  # type: ignore[misc, name-defined] # of any Keras
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(0.25 * tf.reduce_mean(x * x))
            return x

    half = keras.regularizers.L2(0.5)
    ones = {"kernel_initializer": "ones", "use_bias": False}
    body = keras.layers.Dense(2, kernel_regularizer=half, activity_regularizer=half, **ones)
    return keras.Sequential([keras.Input([2]), body, _Adding(), keras.layers.Dense(1, **ones)])


_MADE_UNDER = [(level, True) for level in ("O1", "O2", "O3", "O1-bfloat16", "O2-bfloat16", "O3-bfloat16")]


@pytest.mark.parametrize(("level", "made_under"), [*_MADE_UNDER, ("O1", False), ("O2", False), ("O2-bfloat16", False)])
@for_every_keras()
def test_losses_that_layers_add_are_added_to_the_loss(keras: ModuleType, level: str, made_under: bool) -> None:
    with tfmp.precision(level if made_under else "O0"):
        model = _with_added_losses(keras)
    if not made_under:
        tfmp.set_precision(model, level)
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.SGD(2.0**-4), tfmp.FixedLossScaleManager(64)), "mse")
    # One example: Keras 3.5 adds up the losses of activities over a batch, later versions take their mean.
    history = model.fit(np.float32([[1, 2]]), np.float32([[4]]), verbose=0).history
    # The outputs are 6, and those of the first layer 3: 4 of the squared error, 0.5 * 18 of these, 0.5 * 4 of the
    # weights, and 0.25 * 9 of what the layer adds.
    assert history["loss"] == [4 + 9 + 2 + 2.25]
    kernels = [tf.convert_to_tensor(weight).numpy().tolist() for weight in model.weights]
    # The gradient of the results of the first layer is 4 + 3 + 0.75, that of its weights this times the input, and 1.
    assert kernels == [[[1 - 8.75 / 16] * 2, [1 - 16.5 / 16] * 2], [[1 - 12 / 16]] * 2]
