"""Which way a step runs, by its gradients, what must be known of them, and the programs of its optimizer."""

import math

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, OfTwo, RecordingAdapter, StricterDetector, numbers, scaler_of

import tfmp
from tfmp.core.gradients.derived_gradients import note_change
from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.core.step.choice import unscaled, update_of_scaled, update_of_unscaled
from tfmp.core.step.program_update import ProgramUpdate
from tfmp.core.step.update import OptimizerUpdate
from tfmp.types import Gradients


@pytest.mark.parametrize("kind", SCALERS)
def test_gradients_stay_scaled_for_a_program_that_unscales_them(kind: str) -> None:
    adapter, grads = RecordingAdapter(), [tf.constant(16.0), None]
    update = update_of_scaled(adapter, grads, SCALERS[kind]().facts())
    assert isinstance(update, ProgramUpdate)
    assert (update.adapter, update.grads, float(update.loss_scale)) == (adapter, grads, 8)


def test_gradients_are_unscaled_and_typed_if_there_is_no_program() -> None:
    adapter = RecordingAdapter(has_program=False, overwritten=[1])
    update = update_of_scaled(adapter, [tf.constant(16.0), tf.constant(16.0)], SCALERS["finite"]().facts())
    assert isinstance(update, OptimizerUpdate)
    assert (numbers(update.grads), update.loss_scale) == ([2, 16], None)
    assert update.grads[0].dtype == tf.float16


@pytest.mark.parametrize(("is_compiled", "kind"), [(True, ProgramUpdate), (False, OptimizerUpdate)])
def test_gradients_in_true_magnitude_go_to_a_program_if_it_is_compiled(is_compiled: bool, kind: type) -> None:
    adapter = RecordingAdapter(is_compiled=is_compiled)
    update = update_of_unscaled(adapter, [tf.constant(2.0), None], SCALERS["finite"]().facts())
    assert type(update) is kind
    assert (update.grads[0].dtype, update.loss_scale) == (tf.float16, None)


@pytest.mark.graph
@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize(
    ("kind", "derived", "derived_if_clipped"),
    [
        ("finite", True, True),
        ("below 1", False, False),
        ("saturation", False, False),
        ("own detector", True, False),
        ("largest magnitude", True, False),
    ],
)
def test_step_of_a_graph_has_the_scaled_gradients_if_nothing_has_to_see_the_others(
    kind: str, derived: bool, derived_if_clipped: bool, is_clipped: bool, session: tf.compat.v1.Session
) -> None:
    scaler, scaled = SCALERS[kind](), [tf.constant(16.0), None]
    grads = scaler.unscale(scaled)
    if is_clipped:
        clipped = [grads[0] / 2, None]
        note_change(clipped[0], grads[0], lambda values: values / 2, tf.constant(True))
        grads = clipped
    session.run(tf.compat.v1.global_variables_initializer())
    adapter = RecordingAdapter()
    update = update_of_unscaled(adapter, grads, scaler.facts())
    if derived_if_clipped if is_clipped else derived:
        assert isinstance(update, ProgramUpdate)
        assert (update.adapter, update.grads, session.run(update.loss_scale)) == (adapter, scaled, 8)
        found, held = update.check()
        assert session.run(found.usable)
        assert found.max_abs is None or session.run(found.max_abs) == 2
        # A program that clips measures nothing before; a user's detector needs no squares.
        assert len(held) == len(scaled) + (not is_clipped) + (kind != "own detector")
    else:
        assert isinstance(update, OptimizerUpdate)
        assert (update.grads[0].dtype, update.loss_scale) == (tf.float16, None)
    update = update_of_unscaled(RecordingAdapter(has_program=False), grads, scaler.facts())
    assert isinstance(update, OptimizerUpdate)
    assert update.grads[0].dtype == tf.float16


@pytest.mark.graph
@pytest.mark.parametrize("before", [None, True, False])
@pytest.mark.parametrize("keeps_finite", [True, False])
def test_step_is_skipped_if_a_change_does_not_keep_gradients_finite(
    before: bool | None, keeps_finite: bool, session: tf.compat.v1.Session
) -> None:
    # What was checked unscaled is known of the scaled gradients, which are not read again, whatever they hold.
    scaled = [tf.constant(16.0 if before is None else math.inf), None]
    scaler = scaler_of(tfmp.FixedLossScaleManager(8))
    grads = scaler.unscale(scaled)
    clipped = [grads[0] / 2, None]
    note_change(clipped[0], grads[0], lambda values: values / 2, tf.constant(keeps_finite))
    early = (
        None if before is None else EarlierCheck(LocalResult(tf.constant(before)), checked=[*grads, tf.constant(1.0)])
    )
    found, _ = update_of_unscaled(RecordingAdapter(), clipped, scaler.facts(), early).check()
    assert session.run(found.usable) == (keeps_finite and before is not False)


@pytest.mark.graph
@pytest.mark.parametrize("usable", [True, False])
def test_what_is_known_of_unscaled_gradients_is_known_of_the_scaled_ones(
    usable: bool, session: tf.compat.v1.Session
) -> None:
    class Never(StricterDetector):
        def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
            return tf.constant(False)

    scaler = scaler_of(tfmp.FixedLossScaleManager(8), Never())
    grads = scaler.unscale([tf.constant(16.0), None])
    # This detector has looked at each micro-batch already.
    known = EarlierCheck(LocalResult(tf.constant(usable)), of_micro_batches=True)
    update = update_of_unscaled(RecordingAdapter(), grads, scaler.facts(), known)
    assert isinstance(update, ProgramUpdate)
    assert session.run(update.check()[0].usable) == usable


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_is_known_of_unscaled_gradients_holds_for_every_update(is_compiled: bool) -> None:
    known, adapter = EarlierCheck(LocalResult(tf.constant(False))), RecordingAdapter(is_compiled=is_compiled)
    update = update_of_unscaled(adapter, [tf.constant(2.0), None], SCALERS["finite"]().facts(), known)
    assert not update.check()[0].usable


@pytest.mark.parametrize(("kind", "usable"), [("finite", False), ("below 1", True)])
def test_scaled_gradients_are_checked_scaled_unless_the_scale_can_be_less_than_1(kind: str, usable: bool) -> None:
    # Unscaled, the sum over two replicas would not overflow.
    update = update_of_scaled(RecordingAdapter(), [tf.constant(3e38), None], SCALERS[kind]().facts(OfTwo()))
    assert bool(update.check()[0].usable) is usable


def test_next_values_of_variables_are_not_unscaled() -> None:
    adapter = RecordingAdapter(overwritten=[1])
    assert numbers(unscaled(adapter, [tf.constant(16.0), tf.constant(16.0)], tf.constant(8.0))) == [2, 16]
