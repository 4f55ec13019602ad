"""The check of unscaled gradients before the user clips or changes them."""

import math

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, OfTwo, scaler_of

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.step.early_check import check_early


def test_early_check_tells_what_a_manager_has_to_know() -> None:
    grads = [tf.constant(-3.0), None]
    known = check_early(grads, SCALERS["finite"]().facts())
    assert (bool(known.usable), known.max_abs) == (True, None)
    known = check_early(grads, SCALERS["largest magnitude"]().facts())
    assert (bool(known.usable), float(known.max_abs)) == (True, 3)
    assert not check_early([tf.constant(math.inf)], SCALERS["finite"]().facts()).usable


def test_mean_of_checked_micro_batches_is_checked_early_for_its_finiteness_alone() -> None:
    facts = SCALERS["saturation"]().facts()
    for grad, usable, finite in [(65504 / 8, False, True), (math.inf, False, False), (1.0, True, True)]:
        grads = [tf.constant(grad)]
        assert bool(check_early(grads, facts).usable) is usable
        assert bool(check_early(grads, facts, of_micro_batches=True).usable) is finite


def test_gradient_that_may_overflow_in_the_sum_over_replicas_is_not_usable() -> None:
    scaler, grads = SCALERS["finite"](), [tf.constant(3e38), None]
    assert check_early(grads, scaler.facts(SingleProcess())).usable
    assert not check_early(grads, scaler.facts(OfTwo())).usable


@pytest.mark.graph
def test_early_check_in_a_graph_leaves_room_for_the_sum_over_replicas(session: tf.compat.v1.Session) -> None:
    scaler = scaler_of(tfmp.FixedLossScaleManager(1))
    grads = scaler.unscale([tf.constant(3e38)])
    found = [check_early(grads, scaler.facts(each)).usable for each in (SingleProcess(), OfTwo())]
    assert session.run(found) == [True, False]
