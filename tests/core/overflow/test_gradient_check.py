"""The check of one replica's gradients: in which magnitude they come, what is left out, what a sum could overflow."""

import math

import pytest
import tensorflow as tf

import tfmp
from tfmp.core.overflow.gradient_check import GradientCheck, Scaling
from tfmp.types import Gradients

_NOTHING = [0, 0, 0]


class _OfOneReplica(tfmp.NonFiniteDetector):
    ignores_sums = True


def _check(scaling: Scaling = Scaling.UNSCALED, loss_scale: float = 8.0, **settings: int) -> GradientCheck:
    return GradientCheck(tfmp.NonFiniteDetector(), tf.constant(loss_scale), scaling, **settings)


@pytest.mark.parametrize(
    ("scaling", "checked", "largest"),
    # Gradients that come scaled by 8 are unscaled for the check, or their largest magnitude alone is.
    [(Scaling.UNSCALED, -16.0, 16.0), (Scaling.CHECK_SCALED, -16.0, 2.0), (Scaling.UNSCALE_FIRST, -2.0, 2.0)],
)
def test_magnitude_of_gradients_is_that_of_their_scaling(scaling: Scaling, checked: float, largest: float) -> None:
    check, given = _check(scaling), [tf.constant([4.0, -16.0]), None]
    grads = check.checked_form(given)
    assert (grads is given) is (scaling is not Scaling.UNSCALE_FIRST)
    assert grads[0].numpy().tolist() == [-checked / 4, checked]
    assert grads[1] is None
    assert float(check.max_abs(grads)) == largest
    assert bool(check.all_finite(grads))
    assert check.counts(grads).numpy().tolist() == [_NOTHING, _NOTHING]


@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize(("bad", "counts"), [(math.inf, [1, 0, 0]), (math.nan, [0, 1, 0])])
def test_overflow_is_found_in_every_scaling(scaling: Scaling, bad: float, counts: list[int]) -> None:
    check = _check(scaling)
    grads = check.checked_form([tf.constant([1.0]), None, tf.constant([1.0, bad])])
    assert not bool(check.all_finite(grads))
    assert check.counts(grads).numpy().tolist() == [_NOTHING, _NOTHING, counts]


def test_scaled_gradients_are_not_usable_at_a_scale_below_1_that_a_checkpoint_restored() -> None:
    largest = tf.float32.max
    scaled = [tf.constant([largest])]
    # Divided by 0.5, a gradient that is finite here overflows.
    assert not bool(_check(Scaling.CHECK_SCALED, 0.5).all_finite(scaled))
    assert bool(_check(Scaling.CHECK_SCALED, 1.0).all_finite(scaled))


def test_unscaling_by_a_scale_below_1_finds_what_then_overflows() -> None:
    check = _check(Scaling.UNSCALE_FIRST, 0.5)
    small, large = (check.checked_form([tf.constant([value])]) for value in (2.0, tf.float32.max))
    assert bool(check.all_finite(small))
    assert float(check.max_abs(small)) == 4
    assert not bool(check.all_finite(large))


@pytest.mark.parametrize("scaling", Scaling)
def test_next_value_of_a_variable_is_never_scaled_and_checked_for_finiteness_alone(scaling: Scaling) -> None:
    check = GradientCheck(tfmp.SaturationDetector(), tf.constant(8.0), scaling, overwritten=[1])

    def checked(next_value: float) -> Gradients:
        return check.checked_form([tf.constant([16.0]), tf.constant([next_value])])

    # For a gradient this would be saturated.
    large = checked(1e6)
    assert large[1].numpy().tolist() == [1e6]
    assert bool(check.all_finite(large))
    assert float(check.max_abs(large)) == (16 if scaling is Scaling.UNSCALED else 2)
    assert check.counts(large).numpy().tolist() == [_NOTHING, _NOTHING]
    nan = checked(math.nan)
    assert not bool(check.all_finite(nan))
    assert check.counts(nan).numpy().tolist() == [_NOTHING, [0, 1, 0]]


def test_gradient_that_could_overflow_in_the_sum_over_replicas_counts_as_infinite() -> None:
    grads = [tf.constant([1.0, 0.625 * tf.float32.max]), tf.constant([1.0])]
    alone, summed = _check(), _check(num_summed=2)
    ignoring = GradientCheck(_OfOneReplica(), tf.constant(8.0), num_summed=2)
    assert [bool(check.all_finite(grads)) for check in (alone, summed, ignoring)] == [True, False, True]
    counts = [check.counts(grads).numpy().tolist() for check in (alone, summed, ignoring)]
    assert counts == [[_NOTHING, _NOTHING], [[1, 0, 0], _NOTHING], [_NOTHING, _NOTHING]]


def test_infinity_is_counted_once_where_gradients_are_summed() -> None:
    assert _check(num_summed=2).counts([tf.constant([math.inf, 1.0])]).numpy().tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
@pytest.mark.parametrize("num_summed", [1, 2])
def test_counts_of_large_gradients_are_those_of_all_values(mode: str, num_summed: int) -> None:
    check = _check(num_summed=num_summed)
    overflowed = tf.constant([[math.inf, math.nan, 1.0, 3e38] * 30] * 100)
    grads = [tf.ones([100, 100]), overflowed, None, tf.constant([math.nan]), tf.fill([100, 100], 2e38)]

    def count(grads: Gradients) -> tf.Tensor:
        return check.counts(grads, check.squares(grads))

    counted = {"eager": count, "function": tf.function(count), "xla": tf.function(count, jit_compile=True)}[mode](grads)
    in_sum = [3000, 10000] if num_summed == 2 else [0, 0]
    rows = [_NOTHING, [3000 + in_sum[0], 3000, 0], _NOTHING, [0, 1, 0], [in_sum[1], 0, 0]]
    assert counted.numpy().tolist() == rows
    assert check.counts(grads).numpy().tolist() == rows
