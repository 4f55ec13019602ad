"""Tests of the hook that records the steps, of the stop after skipped steps, and of the lines of progress."""

import dataclasses
import re

import pytest
import tensorflow as tf

pytest.importorskip("tqdm")

from estimator_examples.bert import hooks
from estimator_examples.bert.history import Step
from estimator_examples.bert.progress import Progress

APPLIED = Step(
    attempt=1,
    global_step=1,
    mlm_loss=7.5,
    nsp_loss=0.7,
    learning_rate=0.1,
    loss_scale=2.0**20,
    applied=True,
    consecutive_skips=0,
)
SKIPPED = dataclasses.replace(APPLIED, global_step=0, applied=False, loss_scale=2.0**19, consecutive_skips=2)


@pytest.mark.graph
def test_the_hook_numbers_the_steps_and_calls_every_observer() -> None:
    seen: list[Step] = []
    attempts: list[int] = []
    with tf.Graph().as_default():
        fetches = {
            "global_step": tf.constant(3, tf.int64),
            "mlm_loss": tf.constant(7.5),
            "nsp_loss": tf.constant(0.5),
            "learning_rate": tf.constant(0.25),
            "loss_scale": tf.constant(1024.0),
            "applied": tf.constant(True),
            "consecutive_skips": tf.constant(0, tf.int64),
        }
        hook = hooks.StepHook(fetches, 11, [seen.append, lambda step: attempts.append(step.attempt)])
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            session.run(fetches["mlm_loss"])
            session.run(fetches["mlm_loss"])
    assert attempts == [11, 12]
    assert seen[0] == Step(11, 3, 7.5, 0.5, 0.25, 1024.0, True, 0)


def test_too_many_skipped_steps_in_a_row_end_the_training() -> None:
    observe = hooks.stop_after_skips(3)
    observe(APPLIED)
    observe(SKIPPED)
    message = "gradients of 3 steps in a row were not finite; the loss scale is 524288 now. .*choose a lower one"
    message += ".* lower --init_loss_scale in another --model_dir, "
    with pytest.raises(hooks.TooManySkippedStepsError, match=re.compile(message)):
        observe(dataclasses.replace(SKIPPED, consecutive_skips=3))


def test_progress_shows_losses_at_its_interval_and_every_change_of_the_scale(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(first_step=0, last_step=5, batch_size=8, every=2, loss_scale=2.0**20)
    progress.show(SKIPPED)
    for step in (1, 2, 3):
        progress.show(dataclasses.replace(APPLIED, attempt=1 + step, global_step=step, loss_scale=2.0**19))
    progress.show(dataclasses.replace(APPLIED, attempt=5, global_step=5, loss_scale=2.0**20))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attempt 1: loss scale 1048576 -> 524288 (gradients overflowed, 1 skipped)"
    assert lines[1].startswith("step 2/5: MLM loss 7.500, NSP loss 0.700, loss scale 524288, skipped 1, ")
    assert lines[2] == "attempt 5: loss scale 524288 -> 1048576 (gradients stayed finite)"
    assert lines[3].startswith("step 5/5: ")
    assert len(lines) == 4
