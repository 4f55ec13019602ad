"""half_state, the front door to optimizers whose state is in half precision: its settings, and what it reports."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple, TypeVar

import tensorflow as tf

from tfmp.any_keras.which import is_keras2, keras_of
from tfmp.core import settings
from tfmp.core.dtypes import HALF_TYPES_BY_NAME

_Optimizer = TypeVar("_Optimizer")


def half_state(optimizer: _Optimizer, *, rounding: str | None = None, seed: int = 0, **slots: str) -> _Optimizer:
    """Return an optimizer of Keras 3 that keeps what it remembers for each weight, its slots, in half precision.

    An optimizer such as Adam keeps two float32 numbers for each weight. In half precision they take half of that
    memory, in checkpoints too. All arithmetic stays in float32: a step reads a slot as float32, computes as usual, and
    rounds what it stores. The optimizer that you pass stays as it is; the returned one has its settings, and variables
    of its own, but for those that a class of yours makes in its constructor, which both have.

    If you name no slots, all that can be are stored in bfloat16 with stochastic rounding: the first moments, and the
    second moments and sums of squares. This suits a training of which nothing is known. Other slots stay in float32.

    The first moment, `momentum`, can be in float16 or bfloat16. All other slots, such as Adam's second moment, need
    bfloat16 and stochastic rounding: a step changes them by a thousandth, which rounding to the nearest number would
    take back each time. So do weights in half precision (level O3 of `tfmp.precision`): there is no float32 copy of
    them.

    The random numbers of stochastic rounding follow from the seed, the variable and `iterations`. So they are the same
    on all replicas and after resuming, and a step that a loss-scale optimizer skips leaves them as they were.

    Args:
        optimizer: An optimizer of Keras 3 that is not built yet.
        rounding: "nearest" or "stochastic". By default it is "nearest" for the slots that you name, and "stochastic" if
            you name none. If you pass "stochastic" and no slots, only weights in half precision are rounded.
        seed: Where the random numbers of stochastic rounding start from, a whole number.
        **slots: The types, "float16" or "bfloat16", by the names that Keras gives the slots: `momentum`, `velocity`,
            `velocity_hat`, `accumulator`, `norm` and others.

    Returns:
        The new optimizer, of a subclass of the class of `optimizer`, with its settings and variables of its own. Wrap
        it in `tfmp.LossScaleOptimizer`, or step it by a `tfmp.GradScaler`. Its method `state_bytes()` reports the
        memory of its slots. It is saved and loaded with the types.

    Raises:
        TypeError: `optimizer` is not an optimizer of Keras 3.
        ValueError: The optimizer is built already, wraps others, or has half-precision state already; a slot cannot be
            kept in that type with that rounding. When the optimizer is built: it has no slot of that name, or none
            that can be in half precision; or weights are in half precision and rounding is to the nearest.

    Examples:
        >>> import keras, tfmp
        >>> w = keras.Variable([1.0, 2.0])
        >>> opt = tfmp.half_state(keras.optimizers.Adam(0.5))
        >>> opt.apply([keras.ops.convert_to_tensor([1.0, 2.0])], [w])
        >>> print(opt.state_bytes())
        momentum  bfloat16  4 bytes  -50 %
        velocity  bfloat16  4 bytes  -50 %
        total               8 bytes  -50 %
        >>> w = keras.Variable([1.0, 2.0])
        >>> opt = tfmp.half_state(keras.optimizers.SGD(0.5, momentum=0.9), momentum="float16")
        >>> opt.apply([keras.ops.convert_to_tensor([1.0, 2.0])], [w])
        >>> w.numpy(), opt.variables[-1].dtype
        (array([0.5, 1. ], dtype=float32), 'float16')

    Source: NVIDIA's NVCaffe, which keeps weights and momentum in float16 ("Training with Mixed Precision", 2017);
    Gupta et al., "Deep Learning with Limited Numerical Precision" (2015), for stochastic rounding.

    Provisional: a minor version may change it.
    """
    keras = keras_of(optimizer, "optimizers.Optimizer")
    if keras is None or is_keras2(keras):
        raise TypeError(
            f"optimizer must be an optimizer of Keras 3, got {optimizer!r} of type {type(optimizer).__name__}. Those "
            "of Keras 2 and TensorFlow 1 keep their state in float32."
        )
    wanted = half_settings(slots if slots or rounding else None, rounding, seed)
    return importlib.import_module("tfmp.optimizer_state.keras3").with_half_state(optimizer, wanted)


def half_state_base(keras: ModuleType) -> type:
    """Return the base class of all optimizers with half-precision state, importing it."""
    if is_keras2(keras):
        raise ValueError("tfmp.half_state is for Keras 3: the model was saved by it, and this is Keras 2.")
    found: type = importlib.import_module("tfmp.optimizer_state.keras3").HalfState
    return found


#: The slot that follows the gradients. Each step replaces a tenth of it or so, and with it what rounding did.
_FIRST_MOMENT = "momentum"

#: The slots of Keras' optimizers that are kept in half precision if none is named. Others may be anything.
_BY_DEFAULT = (
    *(_FIRST_MOMENT, "velocity", "velocity_hat", "norm", "accumulator", "linear"),
    *("accumulated_grad", "accumulated_delta_var"),
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


def half_settings(slots: Mapping[str, str] | None, rounding: str | None, seed: int) -> HalfSettings:
    """Return the settings, or raise an error if the training would not be sound with them.

    `slots` are the types by the names of the slots, or None for all slots that can be in half precision. `rounding` is
    "nearest" by default, or "stochastic" if `slots` is None.
    """
    rounding = rounding or ("stochastic" if slots is None else "nearest")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'rounding must be "nearest" or "stochastic", got {rounding!r}.')
    seed = settings.count("seed", seed, least=0)
    if slots is None:
        # bfloat16 has the range of float32.
        return HalfSettings(dict.fromkeys(_BY_DEFAULT, tf.bfloat16.name), rounding, seed, by_default=True)
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
    if slot == _FIRST_MOMENT:
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


class SlotBytes(NamedTuple):
    """The memory of all variables of a kind of slot, such as "momentum"."""

    slot: str
    dtype: str
    bytes: int
    float32_bytes: int


class StateBytes(NamedTuple):
    """The memory of an optimizer's slots, beside what they would take in float32; `str` shows it as a table.

    The kinds of slots are in the order in which the optimizer made them; `tfmp.half_state` shows an example.
    """

    slots: tuple[SlotBytes, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all slots."""
        return sum(slot.bytes for slot in self.slots)

    @property
    def float32_bytes(self) -> int:
        """The bytes that all slots would take in float32."""
        return sum(slot.float32_bytes for slot in self.slots)

    def __str__(self) -> str:
        """Return the table."""
        total = SlotBytes("total", "", self.bytes, self.float32_bytes)
        rows = [(slot.slot, slot.dtype, f"{slot.bytes:,} bytes", _saving(slot)) for slot in (*self.slots, total)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name:{widths[0]}}  {dtype:{widths[1]}}  {size:>{widths[2]}}  {saving}".rstrip()
            for name, dtype, size, saving in rows
        )


def _saving(slot: SlotBytes) -> str:
    if slot.bytes == slot.float32_bytes:
        return ""
    return f"{100 * (slot.bytes / slot.float32_bytes - 1):+.0f} %"
