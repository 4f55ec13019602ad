"""The kit in two processes that Horovod connects: both take the same steps."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import bert_kit_workers
import numpy as np
import published_formulas
import pytest
import replica_processes

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("no_graph_rewrite_after")]

#: Finds what a worker printed by its rank and the name of the training.
_Told = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> _Told:
    """Run the workers once."""
    program = [sys.executable, bert_kit_workers.__file__]
    directory = tmp_path_factory.mktemp("workers")
    finished = replica_processes.run(replica_processes.under_horovod(program), directory, 150)
    assert finished.codes == [0], finished
    return lambda rank, name: finished.states(f"{rank} {name}")[0]


def _means(fed: list[list[list[np.ndarray]]]) -> list[list[np.ndarray]]:
    return [[np.mean(each, axis=0) for each in zip(*run, strict=True)] for run in zip(*fed, strict=True)]


@functools.cache
def _on_the_mean(row: str) -> list[dict[str, Any]]:
    return list(bert_kit_workers.states(_means(bert_kit_workers.inputs()), **bert_kit_workers.ROWS[row]))


def _assert_each_is(expected: list[dict[str, Any]], row: str, told: _Told) -> None:
    for rank in range(bert_kit_workers.WORKERS):
        states = told(rank, row)
        assert len(states) == len(expected)
        for run, (state, own) in enumerate(zip(states, expected, strict=True)):
            assert set(state) == set(own)
            for name, value in own.items():
                np.testing.assert_allclose(state[name], value, rtol=1e-6, err_msg=f"{name} after run {run}")


@pytest.mark.parametrize(
    ("behaviour", "row"),
    [*(("v1", row) for row in bert_kit_workers.ROWS), *(("v2", way) for way in bert_kit_workers.WAYS)],
)
def test_workers_train_as_one_process_on_the_mean(behaviour: str, row: str, told: _Told) -> None:
    expected = _on_the_mean(row)
    # In one process the fourth run overflows. With accumulation, that is in the second of the four windows.
    windows = "num_accumulation_steps" in bert_kit_workers.ROWS[row]
    counted = [0, 1, 1, 1, 1, 2, 2, 3] if windows else [1, 2, 3, 3, 4, 5, 6, 7]
    assert [state["fetched"][0] for state in expected] == counted
    _assert_each_is(expected, f"{behaviour}/{row}", told)


def test_workers_that_share_windows_each_clip_their_own_gradients(told: _Told) -> None:
    runs = bert_kit_workers.CLIPPED_APART["num_accumulation_steps"]

    def clipped(grads: list[np.ndarray]) -> list[np.ndarray]:
        finite = all(np.isfinite(grad).all() for grad in grads)
        return [np.float32(grad) for grad in published_formulas.clipped(grads, runs * 1.0)] if finite else grads

    means = _means([[clipped(grads) for grads in own] for own in bert_kit_workers.inputs()])
    expected = list(bert_kit_workers.states(means, **bert_kit_workers.ROWS["fp32"]))
    clipped_together = list(
        bert_kit_workers.states(_means(bert_kit_workers.inputs()), **bert_kit_workers.CLIPPED_APART)
    )
    assert not np.allclose(expected[-1]["bert/kernel/adam_m"], clipped_together[-1]["bert/kernel/adam_m"], rtol=1e-2)
    _assert_each_is(expected, "v1/clipped_apart", told)


@pytest.mark.parametrize("way", bert_kit_workers.WAYS)
def test_gradients_travel_scaled(way: str, told: _Told) -> None:
    for rank in range(bert_kit_workers.WORKERS):
        (small,) = told(rank, f"small/{way}")
        assert small["unscaled"] == 0.0
        assert small["moment"] == pytest.approx(0.1 * 2.0**-28, rel=1e-6)
