"""half_state, the front door to optimizers whose state is in half precision."""

import importlib
from types import ModuleType
from typing import TypeVar

from tfmp.any_keras.which import is_keras2, keras_of
from tfmp.optimizer_state.settings import half_settings

_Optimizer = TypeVar("_Optimizer")


def half_state(optimizer: _Optimizer, *, rounding: str | None = None, seed: int = 0, **slots: str) -> _Optimizer:
    """Keep what an optimizer of Keras 3 remembers for each weight, its slots, in half precision.

    An optimizer such as Adam keeps two float32 numbers for each weight. In half precision they take half of that
    memory, in checkpoints too. All arithmetic stays in float32: a step reads a slot as float32, computes as usual, and
    rounds what it stores. So this is the optimizer that was passed, with all its settings, but for what it stores.

    If you name no slots, all that can be are stored in bfloat16 with stochastic rounding: the first moments, and the
    second moments and sums of squares. This is the sound choice where nothing is known of the training. bfloat16 has
    the range of float32, and stochastic rounding is right in the mean however little a step changes a slot. Slots of
    other names, in optimizers of your own, stay in float32.

    Which slots can be stored so:

    * `momentum`, the first moment (of SGD, Adam, Lion and others): in float16 or bfloat16. SGD of Keras multiplies it
      by the learning rate, and numbers below 6e-8 are 0 in float16: take bfloat16 for it, unless you know its range.
    * `velocity`, the second moment of Adam, and all other slots: in bfloat16 with `rounding="stochastic"`. A step
      changes such a slot by a thousandth, and rounding to the nearest of bfloat16's numbers, which are almost a
      hundredth apart, would take that back each time. In float16 squares of gradients are mostly 0.
    * Weights in half precision (level O3 of `tfmp.precision`) need `rounding="stochastic"`, for the same reason. There
      is no float32 copy of them: a step computes the next weight in float32, and stores it rounded.

    The random numbers of stochastic rounding follow from the seed, the variable and `iterations`. So they are the same
    on all replicas and after resuming, and a step that a loss-scale optimizer skips leaves them as they were.

    Args:
        optimizer: An optimizer of Keras 3 that is not built yet. It goes on as the object that is returned: use only
            that one. Wrap it in `tfmp.LossScaleOptimizer` afterwards, or step it by a `tfmp.GradScaler`.
        rounding: "nearest" or "stochastic". By default it is "nearest" for the slots that you name, and "stochastic" if
            you name none. If you pass "stochastic" and no slots, only weights in half precision are rounded.
        seed: Where the random numbers of stochastic rounding start from, a whole number.
        **slots: The types, "float16" or "bfloat16", by the names that Keras gives the slots: `momentum`, `velocity`,
            `velocity_hat`, `accumulator`, `norm` and others. By default all that can be in half precision.

    Returns:
        The optimizer, of a subclass of its class. Its method `state_bytes()` reports the memory of its slots. It is
        saved and loaded with the types.

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
        >>> print(opt.state_bytes())
        momentum  float16  4 bytes  -50 %
        total              4 bytes  -50 %

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
    settings = half_settings(slots if slots or rounding else None, rounding, seed)
    return importlib.import_module("tfmp.optimizer_state.keras3").with_half_state(optimizer, settings)


def half_state_base(keras: ModuleType) -> type:
    """Return the base class of all optimizers with half-precision state, importing it."""
    if is_keras2(keras):
        raise ValueError("tfmp.half_state is for Keras 3: the model was saved by it, and this is Keras 2.")
    found: type = importlib.import_module("tfmp.optimizer_state.keras3").HalfState
    return found
