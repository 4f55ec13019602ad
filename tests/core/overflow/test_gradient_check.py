"""The check of one replica's gradients: in which magnitude they come, what is left out, what a sum could overflow."""

import math

import pytest
import tensorflow as tf
from gradient_forms import MODES, in_every_mode

import tfmp
from tfmp.core.overflow.gradient_check import GradientCheck, Scaling
from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.types import Gradients

_NOTHING = [0, 0, 0]


class _OfOneReplica(tfmp.NonFiniteDetector):
    ignores_sums = True


class _Tolerant(tfmp.OverflowDetector):
    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        del grads, loss_scale
        return tf.constant(True)


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


def test_scaled_gradients_are_not_usable_at_a_scale_below_1_unless_they_are_unscaled_first() -> None:
    largest = [tf.constant([tf.float32.max])]
    # A checkpoint may restore such a scale. Divided by 0.5, a gradient that is finite here overflows.
    assert not bool(_check(Scaling.CHECK_SCALED, 0.5).all_finite(largest))
    assert bool(_check(Scaling.CHECK_SCALED, 1.0).all_finite(largest))
    check = _check(Scaling.UNSCALE_FIRST, 0.5)
    small = check.checked_form([tf.constant([2.0])])
    assert bool(check.all_finite(small))
    assert float(check.max_abs(small)) == 4
    assert not bool(check.all_finite(check.checked_form(largest)))


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
    both = check.checked_form([tf.constant([math.inf]), tf.constant([math.nan])])
    assert check.counts(both).numpy().tolist() == [[1, 0, 0], [0, 1, 0]]


def test_gradient_that_could_overflow_in_the_sum_over_replicas_counts_as_infinite() -> None:
    grads = [tf.constant([1.0, 0.625 * tf.float32.max, tf.float32.max]), tf.constant([1.0])]
    # An infinity is counted once.
    assert _check(num_summed=2).counts([tf.constant([math.inf, 1.0])]).numpy().tolist() == [[1, 0, 0]]
    alone, summed = _check(), _check(num_summed=2)
    ignoring = GradientCheck(_OfOneReplica(), tf.constant(8.0), num_summed=2)
    assert [bool(check.all_finite(grads)) for check in (alone, summed, ignoring)] == [True, False, True]
    counts = [check.counts(grads).numpy().tolist() for check in (alone, summed, ignoring)]
    assert counts == [[_NOTHING, _NOTHING], [[2, 0, 0], _NOTHING], [_NOTHING, _NOTHING]]


@pytest.mark.parametrize(("num_summed", "finite"), [(1, True), (2, False)])
def test_detector_alone_decides_where_gradients_are_not_summed(num_summed: int, finite: bool) -> None:
    check = GradientCheck(_Tolerant(), tf.constant(8.0), num_summed=num_summed)
    assert bool(check.all_finite([tf.constant([math.inf])])) is finite


@in_every_mode
@pytest.mark.parametrize("num_summed", [1, 2])
def test_counts_of_large_gradients_are_those_of_all_values(mode: str, num_summed: int) -> None:
    check = _check(num_summed=num_summed)
    overflowed = tf.constant([[math.inf, math.nan, 1.0, 3e38] * 30] * 100)
    grads = [tf.ones([100, 100]), overflowed, None, tf.constant([math.nan]), tf.fill([100, 100], 2e38)]

    def count(grads: Gradients) -> tf.Tensor:
        return check.counts(grads, check.squares(grads))

    counted = MODES[mode](count)(grads)
    in_sum = [3000, 10000] if num_summed == 2 else [0, 0]
    rows = [_NOTHING, [3000 + in_sum[0], 3000, 0], _NOTHING, [0, 1, 0], [in_sum[1], 0, 0]]
    assert counted.numpy().tolist() == rows
    assert check.counts(grads).numpy().tolist() == rows


@pytest.mark.parametrize(
    ("detector", "jit_compile", "num_squares"),
    [(tfmp.NonFiniteDetector(), False, 1), (tfmp.SaturationDetector(), False, 0), (tfmp.NonFiniteDetector(), True, 0)],
)
def test_graph_hands_on_only_squares_that_counts_can_use(
    detector: tfmp.OverflowDetector, jit_compile: bool, num_squares: int
) -> None:
    check, found = GradientCheck(detector, tf.constant(8.0)), []

    def find(grad: tf.Tensor) -> None:
        found.append(len(check.squares([grad])))

    tf.function(find, jit_compile=jit_compile)(tf.ones([100, 100]))
    assert found == [num_squares]
    # Eager code computes nothing ahead that only a skipped step needs.
    assert check.squares([tf.ones([100, 100])]) == []


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_saturated_values_are_counted_although_their_squares_are_finite(mode: str) -> None:
    check = GradientCheck(tfmp.SaturationDetector(), tf.constant(1.0))
    counted = MODES[mode](lambda grad: check.counts([grad], check.squares([grad])))
    assert counted(tf.fill([100, 100], 65504.0)).numpy().tolist() == [[0, 0, 10000]]


def test_counts_of_a_skipped_step_use_the_squares_of_its_check() -> None:
    check = _check()

    @tf.function
    def count(grad: tf.Tensor) -> tf.Tensor:
        squares, nothing = check.squares([grad]), tf.constant([_NOTHING], tf.int64)
        return tf.cond(check.all_finite([grad]), lambda: nothing, lambda: check.counts([grad], squares))

    grad = tf.fill([100, 100], math.nan)
    assert count(grad).numpy().tolist() == [[0, 10000, 0]]
    graph = count.get_concrete_function(grad).graph.as_graph_def()
    assert "L2Loss" in {node.op for node in graph.node}
    assert "L2Loss" not in {node.op for function in graph.library.function for node in function.node_def}


@pytest.mark.parametrize(
    ("before", "value", "usable"), [(True, 1.0, True), (True, math.inf, False), (False, 1.0, False)]
)
def test_gradients_that_were_checked_before_are_not_read_again(before: bool, value: float, usable: bool) -> None:
    old, new = tf.constant([math.nan]), tf.constant([value])
    known = EarlierCheck(LocalResult(tf.constant(before), tf.constant(2.0)), checked=[old])
    for grads, expected in [([old, new, None], usable), ([old, None], before)]:
        found = _check(needs_max_abs=True).of(grads, known)
        assert (bool(found.usable), float(found.max_abs)) == (expected, 2)


@pytest.mark.parametrize(("needs_max_abs", "expected"), [(True, 3.0), (False, None)])
def test_largest_magnitude_is_found_if_it_is_needed_and_not_known(needs_max_abs: bool, expected: float | None) -> None:
    grads = [tf.constant([-3.0, 1.0]), None]
    for known in (None, EarlierCheck(LocalResult(tf.constant(True)))):
        found = _check(needs_max_abs=needs_max_abs).of(grads, known)
        assert bool(found.usable)
        assert found.max_abs == expected
