"""The rate of examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmp import bert


def test_runs_at_the_start_and_after_checkpoints_are_left_out() -> None:
    throughput = bert.Throughput(8, global_step=100, steps_per_checkpoint=4, left_out=2)
    for step in range(101, 109):
        throughput.add(9.0 if step in (101, 102, 105, 106) else 0.5, step)
    assert throughput.attempted == throughput.applied == 16.0


def test_windows_are_left_out_as_a_whole() -> None:
    throughput = bert.Throughput(8, runs_per_step=4, left_out=1)
    for run in range(8):
        throughput.add(9.0 if run < 4 else 0.5, (run + 1) // 4)
    assert throughput.attempted == throughput.applied == 16.0
    assert throughput.seconds == 2.0


def test_a_step_of_a_window_counts_all_its_examples() -> None:
    throughput = bert.Throughput(8, runs_per_step=2, left_out=0)
    for step in (0, 1, 1, 2, 2, 2):
        throughput.add(0.5, step)
    assert throughput.attempted == 16.0
    assert throughput.applied == pytest.approx(2 * 2 * 8 / 3.0)


def test_a_window_that_has_not_ended_is_not_counted() -> None:
    throughput = bert.Throughput(8, runs_per_step=2, left_out=0)
    for seconds, step in ((0.5, 0), (0.5, 1), (9.0, 1)):
        throughput.add(seconds, step)
    assert throughput.attempted == throughput.applied == 16.0


@given(
    runs_per_step=st.integers(1, 5),
    left_out=st.integers(0, 7),
    steps_per_checkpoint=st.none() | st.integers(1, 9),
    resumed_at=st.integers(0, 4),
    runs=st.integers(0, 120),
)
def test_without_skipped_steps_all_that_is_attempted_is_applied(
    runs_per_step: int, left_out: int, steps_per_checkpoint: int | None, resumed_at: int, runs: int
) -> None:
    throughput = bert.Throughput(
        8, runs_per_step=runs_per_step, left_out=left_out, steps_per_checkpoint=steps_per_checkpoint
    )
    for run in range(runs):
        throughput.add(0.5, (resumed_at % runs_per_step + run + 1) // runs_per_step)
    windows = (resumed_at % runs_per_step + runs) // runs_per_step
    counted = windows > left_out and (steps_per_checkpoint is None or steps_per_checkpoint > left_out)
    assert throughput.attempted == throughput.applied
    assert throughput.attempted == 16.0 if counted else throughput.attempted in (0.0, 16.0)


def test_nothing_counted_is_a_rate_of_0() -> None:
    throughput = bert.Throughput(8)
    assert (throughput.attempted, throughput.applied) == (0.0, 0.0)
    throughput.add(1.0, 1)
    assert (throughput.attempted, throughput.applied) == (0.0, 0.0)


def test_a_throughput_of_no_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="examples_per_run must be a whole number from 1"):
        bert.Throughput(0)
