"""What follows from ranges in float32."""

import pytest
import tensorflow as tf

import tfmp
from tfmp.ranges.check.model_runs import Measured
from tfmp.ranges.check.suggestions import bfloat16_needs_scaling, reason_to_keep_float32, suggested_loss_scale


def _histogram(counts: dict[str, int]) -> tfmp.ranges.RangeHistogram:
    return tfmp.ranges.RangeHistogram.from_dict(counts)


@pytest.mark.parametrize("exponent", [-84, -83, -20, -1, 0, 1, 11, 12])
def test_scale_puts_the_largest_gradient_three_bits_below_overflow(exponent: int) -> None:
    gradients = _histogram({str(exponent): 1, "-100": 1000, "zero": 5})
    scale = suggested_loss_scale(gradients)
    assert scale == 2.0 ** (12 - exponent)
    # Three bits: eight times as large is still a number of float16, and 16 times as large is not.
    assert gradients.shares(scale=8 * scale).overflow == 0
    assert gradients.shares(scale=16 * scale).overflow > 0


@pytest.mark.parametrize(("exponent", "expected"), [(13, 1), (100, 1), (-85, 2.0**96), (-150, 2.0**96)])
def test_scale_is_neither_below_1_nor_too_large_for_the_scaled_loss(exponent: int, expected: float) -> None:
    assert suggested_loss_scale(_histogram({str(exponent): 1})) == expected


def test_scale_without_gradients_is_that_for_gradients_of_1() -> None:
    assert suggested_loss_scale(tfmp.ranges.RangeHistogram()) == 2.0**12


def test_infinite_gradients_do_not_count_for_the_scale() -> None:
    assert suggested_loss_scale(_histogram({"0": 1, "infinite": 3, "nan": 2})) == 2.0**12


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"0": 999, "-127": 1}, False),
        ({"0": 998, "-127": 2}, True),
        ({"0": 998, "-140": 2}, True),
        ({"0": 1000, "-126": 1000}, False),
        # Zeros are no loss, and do not dilute what is lost.
        ({"0": 998, "-130": 2, "zero": 10**6}, True),
        ({"zero": 5}, False),
        ({}, False),
    ],
)
def test_bfloat16_needs_scaling_if_more_than_one_gradient_in_a_thousand_is_lost(
    counts: dict[str, int], expected: bool
) -> None:
    assert bfloat16_needs_scaling(_histogram(counts)) is expected


def _measured(largest: float) -> Measured:
    return Measured(tfmp.ranges.RangeHistogram.of(tf.constant(largest)), largest)


def _of(**largest: float) -> dict[str, dict[str, Measured]]:
    kinds = ("cast_inputs", "own_outputs", "weights")
    return {kind: {"layer": _measured(largest[kind])} if kind in largest else {} for kind in kinds}


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        ({"own_outputs": 65519.0, "cast_inputs": 65519.0, "weights": 65519.0}, None),
        ({"own_outputs": 65520.0}, "its activations reach 6.55e+04, and float16 ends at 65504"),
        ({"cast_inputs": 1e6}, "its input reaches 1e+06, and float16 ends at 65504"),
        ({"weights": 3e5}, "its weights reach 3e+05, and float16 ends at 65504"),
        (
            {"own_outputs": 1e5, "cast_inputs": 1e6, "weights": 1e7},
            "its activations reach 1e+05, and float16 ends at 65504",
        ),
        (
            {"own_outputs": 1.0, "cast_inputs": 1e6, "weights": 1e7},
            "its input reaches 1e+06, and float16 ends at 65504",
        ),
        ({"own_outputs": float("inf")}, "its activations reach inf, and float16 ends at 65504"),
        ({}, None),
    ],
)
def test_layer_is_kept_if_something_of_it_rounds_to_infinity(largest: dict[str, float], expected: str | None) -> None:
    assert reason_to_keep_float32("layer", _of(**largest)) == expected
    assert reason_to_keep_float32("another", _of(**largest)) is None


def test_border_is_where_float16_rounds_to_infinity() -> None:
    assert tf.cast(tf.constant([65519.0, 65520.0]), tf.float16).numpy().tolist() == [65504, float("inf")]
