"""Steps whose gradients are summed over the replicas before they are checked."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from recording_adapters import SCALERS, RecordingAdapter, SummedFirst, numbers

from tfmp.core.step.choice import update_of_scaled


class _SummedOfTwo(SummedFirst):
    num_summed = 2


@pytest.mark.parametrize(
    ("value", "is_sparse", "applied", "counts"),
    [
        (16.0, False, [([32], 8)], [[0, 0, 0], [0, 0, 0]]),
        (1.5e38, False, [([3e38], 8)], [[0, 0, 0], [0, 0, 0]]),
        (math.inf, False, [], [[1, 0, 0], [0, 0, 0]]),
        (16.0, True, [([[16, 16]], 8)], [[0, 0, 0], [0, 0, 0]]),
        # Rows of sparse gradients that have the same index are not added up yet.
        (2e38, True, [], [[1, 0, 0], [0, 0, 0]]),
    ],
)
def test_sums_are_what_is_checked_and_applied(
    value: float, is_sparse: bool, applied: list[Any], counts: list[list[int]]
) -> None:
    grad = tf.constant(value)
    if is_sparse:
        grad = tf.IndexedSlices(tf.reshape(grad, [1]), tf.constant([1]), tf.constant([3]))
    scaler, adapter = SCALERS["finite"](), RecordingAdapter(sums=True)
    facts = scaler.facts(_SummedOfTwo())
    scaler.step(update_of_scaled(adapter, [grad, None], facts))
    assert len(adapter.applied) == len(applied)
    for (found, scale), (values, loss_scale) in zip(adapter.applied, applied, strict=True):
        np.testing.assert_allclose(found, values, rtol=1e-6)
        assert scale == loss_scale
    assert adapter.steps == [bool(applied)]
    (report,) = scaler.overflow_reports()
    assert (report.names, report.last.numpy().tolist()) == (["kernel", "bias"], counts)


@pytest.mark.parametrize(("sums_first", "counted"), [(True, 32), (False, 16)])
def test_overflows_are_counted_in_what_the_optimizer_would_check(sums_first: bool, counted: float) -> None:
    adapter = RecordingAdapter(sums=True)
    adapter.sums_first = sums_first
    update = update_of_scaled(adapter, [tf.constant(16.0), None], SCALERS["finite"]().facts(_SummedOfTwo()))
    assert numbers(update.grads) == [counted, None]
    # Of what the replica holds, the sums come first, and the measure last.
    assert numbers(update.check()[1]) == [32, None, counted, None, -32]


@pytest.mark.parametrize(("loss_scale", "usable"), [(1.0, True), (0.5, False)])
def test_scale_below_1_as_from_a_checkpoint_makes_no_sum_usable(loss_scale: float, usable: bool) -> None:
    # Unscaling would make the sums larger.
    facts = SCALERS["finite"]().facts(_SummedOfTwo())._replace(loss_scale=tf.constant(loss_scale))
    update = update_of_scaled(RecordingAdapter(sums=True), [tf.constant(1.0), None], facts)
    assert bool(update.check()[0].usable) is usable
