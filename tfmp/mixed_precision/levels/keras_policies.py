"""Which policy a layer of Keras gets at a level."""

from collections.abc import Mapping, Sequence
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
    "RMSNormalization",
    "STFTSpectrogram",
    "Softmax",
    "SpectralNormalization",
    "UnitNormalization",
)
#: Those that O2 keeps in float32, too: inputs that are not normalized yet may be larger than float16 can be.
_IN_FLOAT32_AT_O2 = ("Normalization",)
#: Those that no level computes in half precision: TensorFlow has no operation that counts so, and XLA fails where it
#: compiles the gradient of a resize, which these layers do to images that are smaller than the crop.
_IN_FLOAT32_ALWAYS = ("CategoryEncoding", "CenterCrop", "RandomCrop")
#: Those of which that holds unless they take the nearest pixel.
_RESIZING = ("Resizing", "UpSampling2D")
#: Those that TensorFlow computes in float16, and not in bfloat16.
_NOT_IN_BFLOAT16 = ("RandomPerspective", "RandomRotation", "RandomShear", "RandomTranslation", "RandomZoom")
#: Activation functions for which O1 keeps the whole layer in float32.
_ACTIVATIONS_IN_FLOAT32_AT_O1 = ("softmax", "log_softmax", "exponential", "exp")
#: The settings of a layer that decide on its policy.
SETTINGS = ("activation", "interpolation")


def settings_of(layer: Any) -> dict[str, Any]:  # noqa: ANN401 - a layer of any Keras
    """Return the settings of a layer that exists, by their names, as far as it has them.

    Args:
        layer: The layer.
    """
    return {name: _attribute(layer, name) for name in SETTINGS}


def _attribute(layer: Any, name: str) -> Any:  # noqa: ANN401 - whatever stands in the attribute
    try:
        return getattr(layer, name, None)
    except Exception:
        # A property of a user's layer may raise anything, as long as the layer is not built.
        return None


def policy_of(keras: ModuleType, layer_class: type, settings: Mapping[str, Any], level: Level) -> str:
    """Return the name of the policy of a layer at a level.

    Args:
        keras: The package that the layer is of.
        layer_class: The class of the layer.
        settings: What the layer has of `SETTINGS`. In a class of the user's, the names may mean anything.
        level: The level.
    """
    kept = [
        *_IN_FLOAT32_ALWAYS,
        *(() if settings.get("interpolation") == "nearest" else _RESIZING),
        *(_NOT_IN_BFLOAT16 if level.half == "bfloat16" else ()),
        *(_IN_FLOAT32_AT_O1 if level.number == 1 else ()),
        *(_IN_FLOAT32_AT_O2 if level.number in (1, 2) else ()),
    ]
    if _is_one_of(keras, layer_class, kept):
        return "float32"
    if level.number == 1 and _takes_exponentials(keras, settings.get("activation")):
        return "float32"
    return level.policy


def _is_one_of(keras: ModuleType, layer_class: type, names: Sequence[str]) -> bool:
    named = [getattr(keras.layers, name, None) for name in names]
    return issubclass(layer_class, tuple(each for each in named if each is not None))


def _takes_exponentials(keras: ModuleType, activation: Any) -> bool:  # noqa: ANN401 - whatever a layer calls so
    if isinstance(activation, keras.layers.Layer):
        return _is_one_of(keras, type(activation), _IN_FLOAT32_AT_O1)
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", None)
    # TensorFlow's own functions have such names.
    return isinstance(name, str) and name.removesuffix("_v2") in _ACTIVATIONS_IN_FLOAT32_AT_O1
