"""The kit in two processes that Horovod connects: one training for both."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import bert_kit_workers
import numpy as np
import pytest
import replica_processes

# In one group: the launch serves all of them.
pytestmark = [
    pytest.mark.horovod,
    pytest.mark.xdist_group("bert_kit"),
    pytest.mark.usefixtures("no_graph_rewrite_after"),
]

_Told = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> _Told:
    """Run the workers once; return what one printed, by a title, its rank and a way."""
    program = [sys.executable, bert_kit_workers.__file__]
    directory = tmp_path_factory.mktemp("workers")
    finished = replica_processes.run(replica_processes.under_horovod(program), directory, seconds=150)
    assert finished.codes == [0], finished

    def lines(title: str, rank: int, way: str = "-") -> list[Any]:
        return [json.loads(line) for line in re.findall(rf"{title} {rank} {way} (.*)$", finished.logs[0], re.MULTILINE)]

    return lines


@pytest.mark.parametrize("row", bert_kit_workers.ROWS)
def test_workers_train_as_one_process_on_the_mean(row: str, told: _Told) -> None:
    fed = bert_kit_workers.inputs()
    means = [[np.mean(each, axis=0) for each in zip(*run, strict=True)] for run in zip(*fed, strict=True)]
    settings = bert_kit_workers.ROWS[row]
    expected = list(bert_kit_workers.states(means, **settings))
    # In one process the fourth run overflowed: with windows, of which there are four, the second of them.
    windows = "num_accumulation_steps" in settings
    counted = [0, 1, 1, 1, 1, 2, 2, 3] if windows else [1, 2, 3, 3, 4, 5, 6, 7]
    assert [state["fetched"][0] for state in expected] == counted
    for rank in range(bert_kit_workers.WORKERS):
        states = told("STATE", rank, row)
        assert len(states) == len(expected)
        for run, (state, own) in enumerate(zip(states, expected, strict=True)):
            for name, value in own.items():
                np.testing.assert_allclose(state[name], value, rtol=1e-6, err_msg=f"{name} after run {run}")


@pytest.mark.parametrize("way", bert_kit_workers.WAYS)
def test_gradients_travel_scaled(way: str, told: _Told) -> None:
    for rank in range(bert_kit_workers.WORKERS):
        (small,) = told("SMALL", rank, way)
        assert small["unscaled"] == 0.0
        assert small["moment"] == pytest.approx(0.1 * 2.0**-28, rel=1e-6)


def test_what_a_worker_saw_itself_is_no_agreement(told: _Told) -> None:
    first, second = (told("OWN", rank)[0] for rank in range(bert_kit_workers.WORKERS))
    # The overflow was the second worker's alone: the first counted it, and went on at another rate.
    assert (first["global_step"], second["global_step"]) == (8, 7)
    assert abs(first["weight"] - second["weight"]) > 0.01
    for row in bert_kit_workers.ROWS:
        ours = [told("STATE", rank, row) for rank in range(bert_kit_workers.WORKERS)]
        assert [state["global_step"] for state in ours[0]] == [state["global_step"] for state in ours[1]]
        np.testing.assert_array_equal(ours[0][-1]["bert/kernel"], ours[1][-1]["bert/kernel"])


def test_an_average_of_integers_agrees_since_horovod_drops_the_fraction(told: _Told) -> None:
    # So it is no fault of the original on Horovod 0.28.1, and rests on how an integer is divided there.
    for rank in range(bert_kit_workers.WORKERS):
        assert told("FLAGS", rank) == [[True, False, False]]
