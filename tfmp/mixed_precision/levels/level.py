"""The levels O0 to O3, and the policy that a layer of Keras gets at each."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

_NUMBERS = {"O0": 0, "O1": 1, "O2": 2, "O3": 3}
_SUFFIXES = {"": "float16", "-float16": "float16", "-bfloat16": "bfloat16"}


class Level(NamedTuple):
    """A precision level."""

    #: 0 for float32; 1 for half precision where that is safe; 2 for half precision in all layers, with weights and
    #: batch normalization in float32; 3 for half precision in all layers, with weights in half precision.
    number: int
    #: The half-precision type, "float16" or "bfloat16".
    half: str

    @property
    def policy(self) -> str:
        """The name of Keras' policy for layers that need no exception at this level."""
        return {0: "float32", 3: self.half}.get(self.number, f"mixed_{self.half}")

    def __str__(self) -> str:
        """Return the name of the level."""
        return f"O{self.number}" + ("-bfloat16" if self.half == "bfloat16" else "")


def level_of(name: object) -> Level:
    """Return a level by its name: O0 to O3 for float16, with "-bfloat16" behind it for bfloat16.

    Examples:
        >>> level_of("O2-bfloat16").policy
        'mixed_bfloat16'
    """
    if not isinstance(name, str):
        raise TypeError(f"a precision level is a string such as 'O2', got {name!r} of type {type(name).__name__}.")
    levels = {
        f"{level}{suffix}": Level(_NUMBERS[level], _SUFFIXES[suffix]) for level in _NUMBERS for suffix in _SUFFIXES
    }
    if name not in levels:
        raise ValueError(
            f"there is no precision level {name!r}: did you mean {_nearest(name, levels)!r}? The levels are "
            f"{', '.join(_NUMBERS)}, in float16; with '-bfloat16' behind them, they are in bfloat16."
        )
    return levels[name]


def _nearest(name: str, names: Iterable[str]) -> str:
    # The names of Keras' policies, and a small or a zero for the big letter.
    policies = {"mixed_float16": "O2", "mixed_bfloat16": "O2-bfloat16"}
    meant = policies.get(name, f"O{name[1:]}" if name[:1] in ("o", "0") else name)
    return difflib.get_close_matches(meant, names, n=1, cutoff=0.0)[0]


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
