"""What follows from what was measured: a loss scale, layers to keep in float32, why gradients are far off."""

import math
from collections.abc import Mapping

from tfmp.ranges.check.model_runs import Measured
from tfmp.ranges.histogram import BFLOAT16, FLOAT16, RangeHistogram
from tfmp.ranges.report import LayerPrecision

#: The powers of two between the largest gradient, scaled, and the largest number of float16.
HEADROOM_BITS = 3

#: Beyond these the scaled loss itself, which is in float32, could overflow; below 1, a manager cannot scale.
_LOWEST_SCALE, _HIGHEST_SCALE = 0, 96

#: Lost gradients are off by their own norm. What is off by more is rounding of terms that are larger than their sum.
_CANCELLED = 2.0


def suggested_loss_scale(gradients: RangeHistogram) -> float:
    """Return the power of two that leaves `HEADROOM_BITS` between the largest gradient and float16's largest number.

    Gradients grow and shrink during training. With three bits, they may become eight times as large before a step is
    skipped.
    """
    exponents = gradients.exponents
    highest = 0 if exponents is None else exponents[1]
    exponent = FLOAT16.highest - HEADROOM_BITS - highest
    return math.ldexp(1.0, min(max(exponent, _LOWEST_SCALE), _HIGHEST_SCALE))


def bfloat16_needs_scaling(gradients: RangeHistogram) -> bool:
    """Return whether bfloat16 would lose gradients that float32 has: more than one in a thousand of those not 0."""
    shares = gradients.shares(BFLOAT16.name)
    return shares.lost + shares.subnormal > 1e-3 * (1 - shares.zero)


def reason_to_keep_float32(name: str, of: Mapping[str, Mapping[str, Measured]]) -> str | None:
    """Return why a layer cannot compute in float16, from its ranges in float32, by their kind; None if it can."""
    words = {"own_outputs": "its activations reach", "cast_inputs": "its input reaches", "weights": "its weights reach"}
    for kind, reach in words.items():
        largest = of[kind][name].largest if name in of[kind] else 0.0
        # From the middle between 65504 and 65536 on, a value is rounded to infinity.
        if largest >= FLOAT16.largest + 2.0 ** (FLOAT16.highest - 11):
            return f"{reach} {largest:.3g}, and float16 ends at {FLOAT16.largest:g}"
    return None


def reason_to_return_float32(far_off: int, loss_scale: float | None) -> str:
    """Return why a layer that returns an output of the model must compute in float32, although it fits into float16.

    Otherwise `far_off` more layers are far off, and `loss_scale` is the highest that overflows nothing, if it is lower.
    """
    found = [f"{far_off} more {'layer is' if far_off == 1 else 'layers are'} far off"] if far_off else []
    found += [] if loss_scale is None else [f"the loss scale can be at most {loss_scale:g}"]
    return f"with its output in float16, {', and '.join(found)}"


def reason_far_off(layer: LayerPrecision, loss_scale: float, tolerance: float) -> str | None:
    """Return why the gradients of a layer in float16 differ from those in float32; None if they hardly do."""
    if layer.relative_error is None or layer.relative_error <= tolerance:
        return None
    if not math.isfinite(layer.relative_error):
        return "its gradients overflow"
    off = f"its gradients differ by {layer.relative_error:.2g} of their norm"
    if layer.relative_error > _CANCELLED:
        return f"{off}: they are sums whose terms cancel, and the rounding of the terms is larger than what is left"
    lost = layer.gradients.shares(scale=loss_scale)
    if lost.lost + lost.subnormal > tolerance * (1 - lost.zero):
        return (
            f"{off}, since even at the scale {lost.lost:.0%} of its gradients vanish and {lost.subnormal:.0%} lose bits"
        )
    kept = layer.activations.shares()
    if kept.lost + kept.subnormal > tolerance * (1 - kept.zero):
        return f"{off}, since {kept.lost:.0%} of its activations vanish and {kept.subnormal:.0%} lose bits"
    return f"{off}, by the rounding of float16 here or in the layers behind it"
