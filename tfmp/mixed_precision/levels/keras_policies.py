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
#: Those that no level computes in half precision, since TensorFlow or Keras cannot: they count; XLA fails where it
#: compiles the gradient of a resize, which the crops do to images that are smaller; or Keras itself mixes the types.
_IN_FLOAT32_ALWAYS = ("CategoryEncoding", "CenterCrop", "CutMix", "Discretization", "MixUp", "RandomCrop")
#: Those of which that holds unless they take the nearest pixel.
_RESIZING = ("Resizing", "UpSampling2D")
#: Those that TensorFlow can compute in one half-precision type, but not in this one: it has no ranges of float16, and
#: does not project images of bfloat16.
_NOT_IN = {
    "float16": ("RandomElasticTransform", "RandomErasing", "RandomGaussianBlur"),
    "bfloat16": (
        "AugMix",
        "RandAugment",
        "RandomPerspective",
        "RandomRotation",
        "RandomShear",
        "RandomTranslation",
        "RandomZoom",
    ),
}
#: Activation functions for which O1 keeps the whole layer in float32, and those that need a range of numbers.
_ACTIVATIONS_IN_FLOAT32_AT_O1 = ("softmax", "log_softmax", "exponential", "exp")
_ACTIVATIONS_NOT_IN = {"float16": ("sparsemax",), "bfloat16": ()}
#: The settings of a layer that decide on its policy.
SETTINGS = ("activation", "interpolation")


def settings_of(layer: Any) -> dict[str, Any]:  # noqa: ANN401 - a layer of any Keras
    """Return the settings of a layer that exists, by their names, as far as it has them."""
    return {name: _attribute(layer, name) for name in SETTINGS}


def _attribute(layer: Any, name: str) -> Any:  # noqa: ANN401 - whatever stands in the attribute
    try:
        return getattr(layer, name, None)
    except Exception:
        # A property of a user's layer may raise anything, as long as the layer is not built.
        return None


def policy_of(keras: ModuleType, layer_class: type, settings: Mapping[str, Any], level: Level) -> str:
    """Return the name of the policy of a layer at a level.

    `settings` is what the layer has of `SETTINGS`. In a class of the user's, the names may mean anything.
    """
    kept = [
        *_IN_FLOAT32_ALWAYS,
        *_NOT_IN[level.half],
        *(() if _name_of(settings.get("interpolation")) == "nearest" else _RESIZING),
        *(_IN_FLOAT32_AT_O1 if level.number == 1 else ()),
        *(_IN_FLOAT32_AT_O2 if level.number in (1, 2) else ()),
    ]
    activation = settings.get("activation")
    activations = [*_ACTIVATIONS_NOT_IN[level.half], *(_ACTIVATIONS_IN_FLOAT32_AT_O1 if level.number == 1 else ())]
    if isinstance(activation, keras.layers.Layer):
        is_kept = _is_one_of(keras, type(activation), kept)
    else:
        # TensorFlow's own functions have names that end so.
        is_kept = _name_of(activation).removesuffix("_v2") in activations
    return "float32" if is_kept or _is_one_of(keras, layer_class, kept) else level.policy


def _name_of(setting: Any) -> str:  # noqa: ANN401 - a name, a function, or what a user's class calls so
    name = setting if isinstance(setting, str) else getattr(setting, "__name__", None)
    return name if isinstance(name, str) else ""


def _is_one_of(keras: ModuleType, layer_class: type, names: Sequence[str]) -> bool:
    named = [getattr(keras.layers, name, None) for name in names]
    return issubclass(layer_class, tuple(each for each in named if each is not None))
