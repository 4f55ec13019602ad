"""Checks what users ask for in half precision: an optimizer's slots, by their names, and how they are rounded."""

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.dtypes import HALF_TYPES_BY_NAME

ROUNDINGS = ("nearest", "stochastic")

#: The slots that follow the gradients themselves. Each step replaces a tenth of them or so, so that what rounding to
#: the nearest value does to them is soon replaced, too.
_FIRST_MOMENTS = frozenset({"momentum"})

#: The slots of Keras' optimizers that are kept in half precision if none is named, and their type: it has the range of
#: float32. Slots of other names, in optimizers that users wrote, may be anything, and stay in float32.
_BY_DEFAULT = dict.fromkeys(
    (
        *("momentum", "velocity", "velocity_hat", "norm", "accumulator", "linear"),
        *("accumulated_grad", "accumulated_delta_var"),
    ),
    tf.bfloat16.name,
)

#: Why a slot is never kept in half precision.
_REFUSED = {
    "average": (
        "it is the moving average of the weights, which is used in their place: leave it in float32, or do without "
        "use_ema"
    ),
    "average_gradient": (
        "RMSprop subtracts its square from another average, and their difference could be below 0: leave it in float32"
    ),
    "gradient_accumulator": (
        "it is a sum of gradients: leave it in float32, or accumulate by tfmp.LossScaleOptimizer(optimizer, "
        "accumulation_steps=...)"
    ),
}


class HalfSettings(NamedTuple):
    """What of an optimizer's state is in half precision."""

    #: The types of the slots in half precision, by the names of the slots.
    dtypes: dict[str, str]
    rounding: str
    seed: int
    #: True if the user named no slots: an optimizer then need not have all those in `dtypes`.
    by_default: bool = False

    @property
    def is_stochastic(self) -> bool:
        """True for stochastic rounding."""
        return self.rounding == "stochastic"

    def dtype_of(self, slot: str) -> tf.DType | None:
        """Return the half-precision type of a slot; None if the slot stays as it is."""
        return HALF_TYPES_BY_NAME.get(self.dtypes.get(slot, ""))

    def without(self, slot: str) -> "HalfSettings":
        """Return the settings with a slot in float32."""
        return self._replace(dtypes={name: dtype for name, dtype in self.dtypes.items() if name != slot})


def half_settings(slots: Mapping[str, str] | None, rounding: str | None, seed: int) -> HalfSettings:
    """Return the settings, or raise an error if the training would not be sound with them.

    `slots` are the types by the names of the slots, or None for all slots that can be in half precision. `rounding` is
    "nearest" by default, or "stochastic" if `slots` is None.

    Examples:
        >>> half_settings({"velocity": "bfloat16"}, "nearest", 0)
        Traceback (most recent call last):
            ...
        ValueError: velocity='bfloat16' needs rounding='stochastic': a step changes this slot by less than half the
        distance between two numbers of bfloat16, so that it would stay where it is.
    """
    rounding = rounding or ("stochastic" if slots is None else "nearest")
    if rounding not in ROUNDINGS:
        raise ValueError(f'rounding must be "nearest" or "stochastic", got {rounding!r}.')
    seed = settings.count("seed", seed, least=0)
    if slots is None:
        return HalfSettings(dict(_BY_DEFAULT), rounding, seed, by_default=True)
    found = HalfSettings(dict(slots), rounding, seed)
    if not slots and not found.is_stochastic:
        raise ValueError(
            "there is nothing to keep in half precision: name the optimizer's slots, such as momentum='bfloat16', or "
            "leave rounding out to keep all slots in bfloat16, or pass rounding='stochastic' to train weights that are "
            "in half precision themselves."
        )
    for slot, dtype in slots.items():
        _validate(slot, dtype, found.is_stochastic)
    return found


def _validate(slot: str, dtype: str, is_stochastic: bool) -> None:
    if not (isinstance(dtype, str) and dtype in HALF_TYPES_BY_NAME):
        raise ValueError(f'{slot} must be "float16" or "bfloat16", got {dtype!r}.')
    if slot in _REFUSED:
        raise ValueError(f"{slot} cannot be kept in half precision: {_REFUSED[slot]}.")
    if slot in _FIRST_MOMENTS:
        return
    if dtype == "float16":
        raise ValueError(
            f"{slot}='float16' is not possible: such a slot holds squares of gradients or sums of them, most of which "
            "are 0 in float16, so that the step that is divided by them would be far too large. bfloat16 has the range "
            f"of float32: pass {slot}='bfloat16' and rounding='stochastic', or leave {slot} in float32."
        )
    if not is_stochastic:
        raise ValueError(
            f"{slot}='bfloat16' needs rounding='stochastic': a step changes this slot by less than half the distance "
            "between two numbers of bfloat16, so that it would stay where it is."
        )
