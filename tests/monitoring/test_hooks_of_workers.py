"""Hooks in two processes under Horovod, with the behaviour of TensorFlow 2 and of TensorFlow 1."""

import itertools
import sys
from pathlib import Path

import graph_range_workers
import pytest
import replica_processes


@pytest.mark.horovod
def test_workers_see_the_sum_over_all_of_them(tmp_path: Path) -> None:
    program = [sys.executable, graph_range_workers.__file__]
    finished = replica_processes.run(replica_processes.under_horovod(program), tmp_path, 120)
    assert finished.codes == [0], str(finished)
    # Gradients are the mean of 4 and 8 on both workers, before and after they are scaled.
    expected = {
        "step": 2,
        "loss_scale": 16,
        "gradients": {"w": {"2": 2, "zero": 2}},
        "weights": {"w": {"0": 2, "1": 2}},
        "activations": {"product": {"2": 1, "3": 1, "zero": 2}},
        "activation_gradients": {"product": {"0": 4}},
    }
    for behavior, rank in itertools.product(("v2", "v1"), range(2)):
        assert finished.states(f"{behavior}/hook/{rank}") == [[expected]]
        assert finished.states(f"{behavior}/counts/{rank}") == [[[{"0": 3, "1": 1}, {}]]]
