"""Which way a step runs, by its gradients, what must be known of them, and the programs of its optimizer."""

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, OfTwo, RecordingAdapter, numbers

from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.core.step.choice import unscaled, update_of_scaled, update_of_unscaled
from tfmp.core.step.program_update import ProgramUpdate
from tfmp.core.step.update import OptimizerUpdate


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
