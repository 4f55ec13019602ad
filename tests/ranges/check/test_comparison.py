"""The agreement of two lists of gradients, summed over batches."""

import math

import numpy as np
import pytest

from tfmp.ranges.check.comparison import GradientAgreement, GradientComparison


def _compared(*batches: tuple[list[float], list[float]]) -> GradientAgreement | None:
    comparison = GradientComparison()
    for one, other in batches:
        comparison.add({"layer": [np.array(one)]}, {"layer": [np.array(other)]})
    return comparison.agreement("layer")


def test_equal_gradients_agree() -> None:
    assert _compared(([3.0, 4.0], [3.0, 4.0])) == (1, 0)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([3.0, 4.0], [3.0, 6.0], (33 / (5 * math.sqrt(45)), 2 / 5)),
        ([3.0, 4.0], [-3.0, -4.0], (-1, 2)),
        ([2.0, 0.0], [0.0, 2.0], (0, math.sqrt(2))),
        ([3.0, 4.0], [6.0, 8.0], (1, 1)),
    ],
)
def test_error_is_relative_to_the_norm_in_float32(
    one: list[float], other: list[float], expected: tuple[float, float]
) -> None:
    assert _compared((one, other)) == pytest.approx(expected)


def test_batches_and_variables_are_parts_of_one_vector() -> None:
    comparison = GradientComparison()
    comparison.add({"a": [np.array([[3.0]]), np.array([0.0])]}, {"a": [np.array([[3.0]]), np.array([1.0])]})
    comparison.add({"a": [np.array([[4.0]]), np.array([0.0])]}, {"a": [np.array([[4.0]]), np.array([2.0])]})
    assert comparison.agreement("a") == pytest.approx((25 / math.sqrt(25 * 30), math.sqrt(5) / 5))


def test_gradients_of_opposite_batches_do_not_cancel() -> None:
    assert _compared(([1.0], [1.0]), ([-1.0], [-1.0])) == pytest.approx((1, 0))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_gradients_that_overflow_are_infinitely_far_off(value: float) -> None:
    found = _compared(([1.0, 2.0], [1.0, value]), ([1.0, 2.0], [1.0, 2.0]))
    assert found is not None
    assert (math.isnan(found.cosine), found.relative_error) == (True, math.inf)


def test_gradients_that_vanish_have_no_direction() -> None:
    found = _compared(([1.0, 2.0], [0.0, 0.0]))
    assert found is not None
    assert (math.isnan(found.cosine), found.relative_error) == (True, 1)


@pytest.mark.parametrize("grads", [([0.0], [0.0]), ([0.0], [1.0]), ([], [])])
def test_nothing_is_compared_with_gradients_of_0(grads: tuple[list[float], list[float]]) -> None:
    assert _compared(grads) is None


def test_layers_are_compared_by_name() -> None:
    comparison = GradientComparison()
    comparison.add({"a": [np.ones(1)], "b": [np.ones(1)]}, {"b": [np.zeros(1)], "a": [np.ones(1)]})
    assert [comparison.agreement(name) is not None for name in ("a", "b", "c")] == [True, True, False]
    assert [comparison.agreement(name)[1] for name in ("a", "b")] == [0, 1]  # type: ignore[index]  # not None, as asserted above
