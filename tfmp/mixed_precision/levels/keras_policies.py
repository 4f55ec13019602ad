"""Which policy a layer of Keras gets at a level."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tfmp.mixed_precision.levels.level import Level

#: Classes of layers that O1 keeps in float32: they normalize, take exponentials, or sum over many values, and Keras
#: itself would do that in half precision; `Lambda` may do anything.
_IN_FLOAT32_AT_O1 = (
    "ActivityRegularization",
    "AdaptiveAveragePooling1D",
    "AdaptiveAveragePooling2D",
    "AdaptiveAveragePooling3D",
    "CategoryEncoding",
    "GlobalAveragePooling1D",
    "GlobalAveragePooling2D",
    "GlobalAveragePooling3D",
    "GroupNormalization",
    "Lambda",
    "MelSpectrogram",
    "Normalization",
    "RMSNormalization",
    "STFTSpectrogram",
    "Softmax",
    "SpectralNormalization",
    "UnitNormalization",
)
#: Those that O2 keeps in float32, too: inputs that are not normalized yet may be larger than float16 can be, and
#: TensorFlow cannot count in half precision.
_IN_FLOAT32_AT_O2 = ("CategoryEncoding", "Normalization")
#: Activation functions for which O1 keeps the whole layer in float32.
_ACTIVATIONS_IN_FLOAT32_AT_O1 = ("softmax", "log_softmax", "exponential", "exp")


def policy_of(keras: ModuleType, layer_class: type, activation: Any, level: Level) -> str:  # noqa: ANN401
    """Return the name of the policy of a layer at a level.

    Args:
        keras: The package that the layer is of.
        layer_class: The class of the layer.
        activation: The layer's activation function, or its name, or None.
        level: The level.
    """
    if level.number == 1 and (
        _is_one_of(keras, layer_class, _IN_FLOAT32_AT_O1) or _takes_exponentials(keras, activation)
    ):
        return "float32"
    if level.number == 2 and _is_one_of(keras, layer_class, _IN_FLOAT32_AT_O2):
        return "float32"
    return level.policy


def _is_one_of(keras: ModuleType, layer_class: type, names: Sequence[str]) -> bool:
    named = [getattr(keras.layers, name, None) for name in names]
    return issubclass(layer_class, tuple(each for each in named if each is not None))


def _takes_exponentials(keras: ModuleType, activation: Any) -> bool:  # noqa: ANN401 - a name, a function or a layer
    if isinstance(activation, keras.layers.Layer):
        return _is_one_of(keras, type(activation), _IN_FLOAT32_AT_O1)
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", "")
    # TensorFlow's own functions have such names.
    return name.removesuffix("_v2") in _ACTIVATIONS_IN_FLOAT32_AT_O1
