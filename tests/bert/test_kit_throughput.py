"""The rate of examples."""

import pytest

from tfmp import bert


def test_runs_at_the_start_and_after_checkpoints_are_left_out() -> None:
    throughput = bert.Throughput(8, global_step=100, steps_per_checkpoint=4, left_out=2)
    for step in range(101, 109):
        throughput.add(9.0 if step in (101, 102, 105, 106) else 0.5, step)
    assert throughput.attempted == throughput.applied == 16.0


def test_a_step_of_a_window_counts_all_its_examples() -> None:
    throughput = bert.Throughput(8, runs_per_step=2, left_out=0)
    for step in (0, 1, 1, 2, 2, 2):
        throughput.add(0.5, step)
    assert throughput.attempted == 16.0
    assert throughput.applied == pytest.approx(2 * 2 * 8 / 3.0)


def test_nothing_counted_is_a_rate_of_0() -> None:
    throughput = bert.Throughput(8)
    assert (throughput.attempted, throughput.applied) == (0.0, 0.0)
    throughput.add(1.0, 1)
    assert (throughput.attempted, throughput.applied) == (0.0, 0.0)


def test_a_throughput_of_no_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="examples_per_run must be a whole number from 1"):
        bert.Throughput(0)
