"""Steps whose own gradients are checked, and which the optimizer applies by itself."""

import math

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, OfTwo, RecordingAdapter

from tfmp.core.distribute import SingleProcess
from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.core.step.choice import update_of_unscaled


@pytest.mark.parametrize(
    ("usable", "checked", "grad", "applied"),
    [
        (True, 2.0, 2.0, True),
        (False, 2.0, 2.0, False),
        # The same tensor is not checked again.
        (True, math.inf, None, True),
        (True, 2.0, math.inf, False),
        (False, 2.0, 3.0, False),
        (True, 2.0, 3.0, True),
    ],
)
def test_step_checks_only_gradients_that_changed_since_an_earlier_check(
    usable: bool, checked: float, grad: float | None, applied: bool
) -> None:
    scaler, adapter, before = SCALERS["finite"](), RecordingAdapter(), tf.constant(checked, tf.float16)
    known = EarlierCheck(LocalResult(tf.constant(usable)), checked=[before])
    after = before if grad is None else tf.constant(grad, tf.float16)
    scaler.step(update_of_unscaled(adapter, [after, None], scaler.facts(), known))
    assert adapter.steps == [applied]
    assert adapter.applied == [[float(after), None]] * applied
    assert float(scaler.scale(tf.constant(1.0))) == (8 if applied else 4)


@pytest.mark.parametrize(("max_abs", "expected"), [(None, 3.0), (5.0, 5.0)])
def test_largest_magnitude_is_that_of_an_earlier_check_if_it_has_one(max_abs: float | None, expected: float) -> None:
    known = EarlierCheck(LocalResult(tf.constant(True), None if max_abs is None else tf.constant(max_abs)))
    grads = [tf.constant(-3.0), None]
    for kind, found in [("largest magnitude", expected), ("finite", None)]:
        scaler = SCALERS[kind]()
        update = update_of_unscaled(RecordingAdapter(), grads, scaler.facts(), known)
        assert scaler.run(update)[1].max_abs == found


@pytest.mark.parametrize(("distribution", "usable"), [(SingleProcess(), True), (OfTwo(), False)], ids=["alone", "two"])
def test_gradient_that_may_overflow_in_the_sum_over_replicas_is_skipped(
    distribution: SingleProcess, usable: bool
) -> None:
    scaler, adapter = SCALERS["finite"](), RecordingAdapter()
    grads = [None, tf.constant(3e38)]
    scaler.step(update_of_unscaled(adapter, grads, scaler.facts(distribution)))
    assert adapter.steps == [usable]


def test_sum_that_is_checked_needs_no_room_for_further_replicas() -> None:
    scaler, adapter = SCALERS["finite"](), RecordingAdapter()
    adapter.sums_first = True
    scaler.step(update_of_unscaled(adapter, [None, tf.constant(3e38)], scaler.facts(OfTwo())))
    assert adapter.steps == [True]


@pytest.mark.parametrize(
    ("grads", "overwritten", "of_micro_batches", "applied"),
    [
        ([1.0, 65504 / 8], [], False, False),
        ([1.0, 65504 / 8], [], True, True),
        ([1.0, math.nan], [], True, False),
        ([65504 / 8, 1.0], [], False, False),
        # What will be the next value of its variable was never scaled.
        ([1.0, 65504 / 8], [1], False, True),
    ],
)
def test_detector_looks_at_gradients_that_were_scaled_and_not_looked_at_before(
    grads: list[float], overwritten: list[int], of_micro_batches: bool, applied: bool
) -> None:
    scaler, adapter = SCALERS["saturation"](), RecordingAdapter(overwritten=overwritten)
    known = EarlierCheck(LocalResult(tf.constant(True)), of_micro_batches=of_micro_batches)
    update = update_of_unscaled(adapter, [tf.constant(grad) for grad in grads], scaler.facts(), known)
    scaler.step(update)
    assert adapter.steps == [applied]
