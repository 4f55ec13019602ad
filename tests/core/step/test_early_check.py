"""The check of unscaled gradients before the user clips or changes them."""

import math

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, OfTwo, scaler_of

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.gradients.derived_gradients import note_change
from tfmp.core.graph_search import with_ancestors
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
@pytest.mark.parametrize(
    ("kind", "is_clipped", "reads_scaled", "max_abs"),
    [
        ("finite", False, True, None),
        ("finite", True, False, None),
        ("below 1", False, False, None),
        ("saturation", False, False, None),
        ("largest magnitude", False, True, 2.0),
        ("largest magnitude", True, False, 1.0),
    ],
)
def test_early_check_in_a_graph_reads_scaled_gradients_if_these_tell_the_same(
    kind: str, is_clipped: bool, reads_scaled: bool, max_abs: float | None, session: tf.compat.v1.Session
) -> None:
    scaler, scaled = SCALERS[kind](), tf.compat.v1.placeholder(tf.float32, [])
    grads = scaler.unscale([scaled, None])
    if is_clipped:
        clipped = grads[0] / 2
        note_change(clipped, grads[0], lambda values: values / 2, tf.constant(True))
        grads = [clipped, None]
    known = check_early(grads, scaler.facts())
    session.run(tf.compat.v1.global_variables_initializer())
    assert [session.run(known.usable, {scaled: value}) for value in (16.0, math.inf)] == [True, False]
    assert (grads[0].op not in with_ancestors([known.usable.op])) is reads_scaled
    assert (None if max_abs is None else session.run(known.max_abs, {scaled: -16.0})) == max_abs


@pytest.mark.graph
def test_early_check_in_a_graph_leaves_room_for_the_sum_over_replicas(session: tf.compat.v1.Session) -> None:
    scaler = scaler_of(tfmp.FixedLossScaleManager(1))
    grads = scaler.unscale([tf.constant(3e38)])
    found = [check_early(grads, scaler.facts(each)).usable for each in (SingleProcess(), OfTwo())]
    assert session.run(found) == [True, False]
