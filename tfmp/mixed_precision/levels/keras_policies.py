"""Which policy a layer of Keras gets at a level."""

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
#: Activation functions for which O1 keeps the whole layer in float32.
_ACTIVATIONS_IN_FLOAT32_AT_O1 = ("softmax", "log_softmax", "exponential")


def policy_of(keras: ModuleType, layer_class: type, activation: Any, level: Level) -> str:  # noqa: ANN401
    """Return the name of the policy of a layer at a level.

    Args:
        keras: The package that the layer is of.
        layer_class: The class of the layer.
        activation: The layer's activation function, or its name, or None.
        level: The level.
    """
    if level.number == 1 and (_sums_or_normalizes(keras, layer_class) or _takes_exponentials(keras, activation)):
        return "float32"
    return level.policy


def _sums_or_normalizes(keras: ModuleType, layer_class: type) -> bool:
    named = [getattr(keras.layers, name, None) for name in _IN_FLOAT32_AT_O1]
    return issubclass(layer_class, tuple(each for each in named if each is not None))


def _takes_exponentials(keras: ModuleType, activation: Any) -> bool:  # noqa: ANN401 - a name, a function or a layer
    named = [getattr(keras.activations, name, None) for name in _ACTIVATIONS_IN_FLOAT32_AT_O1]
    return activation in _ACTIVATIONS_IN_FLOAT32_AT_O1 or any(activation is each for each in named if each is not None)
