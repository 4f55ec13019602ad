"""What follows from ranges in float32: a loss scale, layers to keep in float32, whether bfloat16 needs scaling."""

import math
from collections.abc import Mapping

from tfmp.ranges.check.passes import Measured
from tfmp.ranges.half_types import BFLOAT16, FLOAT16
from tfmp.ranges.histogram import RangeHistogram

#: The powers of two between the largest gradient, scaled, and the largest number of float16.
HEADROOM_BITS = 3

#: Beyond these the scaled loss itself, which is in float32, could overflow; below 1, a manager cannot scale.
_LOWEST_SCALE, _HIGHEST_SCALE = 0, 96


def suggested_loss_scale(gradients: RangeHistogram) -> float:
    """Return the power of two that leaves `HEADROOM_BITS` between the largest gradient and float16's largest number.

    Gradients grow and shrink during training. With three bits, they may become eight times as large before a step is
    skipped.

    Args:
        gradients: All gradients, of activations and of weights.

    Example:
        >>> import tensorflow as tf
        >>> suggested_loss_scale(RangeHistogram.of(tf.constant([1.5, 1e-6])))
        4096.0
    """
    exponents = gradients.exponents
    highest = 0 if exponents is None else exponents[1]
    exponent = FLOAT16.highest - HEADROOM_BITS - highest
    return math.ldexp(1.0, min(max(exponent, _LOWEST_SCALE), _HIGHEST_SCALE))


def bfloat16_needs_scaling(gradients: RangeHistogram) -> bool:
    """Return whether bfloat16 would lose gradients that float32 has: more than one in a thousand of those not 0.

    Args:
        gradients: All gradients.
    """
    shares = gradients.shares(BFLOAT16.name)
    return shares.lost + shares.subnormal > 1e-3 * (1 - shares.zero)


def reason_to_keep_float32(name: str, of: Mapping[str, Mapping[str, Measured]]) -> str | None:
    """Return why a layer cannot compute in float16, from its ranges in float32; None if nothing speaks against it.

    Args:
        name: The layer's name.
        of: What is measured of inputs, outputs and weights.
    """
    words = {"outputs": "its activations reach", "inputs": "its input reaches", "weights": "its weights reach"}
    for kind, reach in words.items():
        largest = of[kind][name].largest if name in of[kind] else 0.0
        # From the middle between 65504 and 65536 on, a value is rounded to infinity.
        if largest >= FLOAT16.largest + 2.0 ** (FLOAT16.highest - 11):
            return f"{reach} {largest:.3g}, and float16 ends at {FLOAT16.largest:g}"
    return None
