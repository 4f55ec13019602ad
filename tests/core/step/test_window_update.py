"""Steps with the mean of micro-batches that overflowed; `test_window.py` tests when such steps are taken."""

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, RecordingAdapter, numbers

from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.core.step.choice import update_of_unscaled
from tfmp.core.step.program_update import ProgramUpdate
from tfmp.core.step.update import OptimizerUpdate
from tfmp.core.step.window_update import WindowUpdate


def _window_update(adapter: RecordingAdapter, **found: bool) -> WindowUpdate:
    check = LocalResult(**{name: tf.constant(flag) for name, flag in found.items()})
    known = EarlierCheck(check, of_micro_batches=True, overflow_counts=tf.constant([[0, 2, 0], [0, 0, 0]], tf.int64))
    update = update_of_unscaled(adapter, [tf.constant(2.0), None], SCALERS["finite"]().facts(), known)
    assert isinstance(update, WindowUpdate)
    return update


def test_only_a_mean_of_micro_batches_becomes_one() -> None:
    for known in (None, EarlierCheck(LocalResult(tf.constant(True)))):
        update = update_of_unscaled(RecordingAdapter(), [tf.constant(2.0), None], SCALERS["finite"]().facts(), known)
        assert not isinstance(update, WindowUpdate)


@pytest.mark.parametrize(
    ("is_compiled", "kind", "applied"),
    [(False, OptimizerUpdate, [2, None]), (True, ProgramUpdate, ([2, None], 1, [2]))],
)
def test_mean_is_checked_and_applied_by_the_update_that_it_would_be_alone(
    is_compiled: bool, kind: type, applied: object
) -> None:
    adapter = RecordingAdapter(is_compiled=is_compiled)
    update = _window_update(adapter, usable=True, complete=False)
    assert type(update._of_mean) is kind
    assert (update.adapter, numbers(update.grads)) == (adapter, [2, None])
    found, held = update.check()
    assert (bool(found.usable), bool(found.complete)) == (True, False)
    update.apply(held)
    assert adapter.applied == [applied]


def test_counts_of_micro_batches_are_recorded_with_an_applied_and_with_a_skipped_step() -> None:
    update = _window_update(RecordingAdapter(), usable=True)
    _, held = update.check()
    assert update.counts_if_applied(held).numpy().tolist() == [[0, 2, 0], [0, 0, 0]]
    infinite = [tf.constant(float("inf")), *held[1:]]
    assert update.counts(infinite).numpy().tolist() == [[1, 2, 0], [0, 0, 0]]
    assert update._of_mean.counts_if_applied(held[:-1]) is None
