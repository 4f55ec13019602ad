"""What one of Horovod's two processes sends and what it makes of the sums, with a stand-in for the other process.

Processes of Horovod itself train in `tests/optimizers/test_horovod.py`.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmp.core.distribute import Horovod


class _Processes:
    """The functions of `horovod.tensorflow` on the first of two processes; keeps the names and types of what it sent.

    Args:
        alike: Whether the other process sends the same values; zeros otherwise.
    """

    Sum = "sum"

    def __init__(self, *, alike: bool) -> None:
        self._others = 1 if alike else 0
        self.sent: list[tuple[str, tf.DType]] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def allreduce(self, values: tf.Tensor, op: Any, name: str) -> tf.Tensor:
        assert op == self.Sum
        self.sent.append((name, values.dtype))
        return values + values * self._others

    def allgather(self, values: tf.Tensor, name: str) -> tf.Tensor:
        self.sent.append((name, values.dtype))
        return tf.concat([values, values * self._others], axis=0)


@pytest.mark.parametrize("dtype", [None, tf.float16])
def test_mean_travels_in_the_type_that_is_asked_for(dtype: tf.DType | None) -> None:
    processes = _Processes(alike=True)
    sparse = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    dense, none, gathered = Horovod(processes).mean([tf.constant([2.0, 6.0]), None, sparse], ["a", "b", "c"], dtype)
    assert dense.numpy().tolist() == [2, 6]
    assert none is None
    # Rows of all processes, each divided by their number.
    assert (gathered.values.numpy().tolist(), gathered.indices.numpy().tolist()) == ([[1], [1]], [1, 1])
    assert {dense.dtype, gathered.dtype} == {tf.float32}
    travelled = dtype or tf.float32
    assert processes.sent == [
        ("forms_of_gradients", tf.float32),
        ("gradient_0", travelled),
        ("gradient_2_values", travelled),
        ("gradient_2_indices", tf.int32),
    ]


def test_sum_does_not_overflow_where_the_mean_fits() -> None:
    largest = tf.float16.max
    (mean,) = Horovod(_Processes(alike=True)).mean([tf.constant([largest], tf.float16)], ["kernel"], None)
    assert mean.numpy().tolist() == [largest]


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("with_max_abs", [False, True])
def test_processes_agree_by_one_collective(usable: bool, with_max_abs: bool) -> None:
    processes = _Processes(alike=False)
    max_abs = tf.constant(3.0) if with_max_abs else None
    applied, largest = Horovod(processes).agree(tf.constant(usable), max_abs, [], [])
    assert bool(applied) is usable
    assert processes.sent == [("step_result", tf.float32)]
    assert largest is None if max_abs is None else float(largest) == 3


def test_total_and_maximum_are_named_for_horovod() -> None:
    processes = _Processes(alike=False)
    values = tf.constant([1, 5], tf.int64)
    assert Horovod(processes).total(values, "micro_batches").numpy().tolist() == [1, 5]
    assert Horovod(processes).maximum(values, "overflow_counts").numpy().tolist() == [1, 5]
    assert [name for name, _ in processes.sent] == ["micro_batches", "overflow_counts"]


def test_processes_that_differ_in_what_has_a_gradient_stop_and_name_it() -> None:
    grads, names = [tf.constant([1.0]), None], ["kernel", "bias"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)the workers differ.*kernel"):
        Horovod(_Processes(alike=False)).mean(grads, names, None)


class _UnmarkedOps(_Processes):
    """Sends by ops that are not marked as stateful, as Horovod's are not; counts how often each of them runs."""

    def __init__(self) -> None:
        super().__init__(alike=True)
        self.ran: Counter[str] = Counter()

    def allreduce(self, values: tf.Tensor, op: Any, name: str) -> tf.Tensor:
        return super().allreduce(self._sent(values, name), op, name)

    def allgather(self, values: tf.Tensor, name: str) -> tf.Tensor:
        return super().allgather(self._sent(values, name), name)

    def _sent(self, values: tf.Tensor, name: str) -> tf.Tensor:
        def run(array: np.ndarray) -> np.ndarray:
            self.ran[name] += 1
            return array

        return tf.ensure_shape(tf.numpy_function(run, [values], values.dtype, stateful=False), values.shape)


@pytest.mark.graph
def test_constants_are_sent_whenever_the_graph_runs_and_not_while_it_is_optimized(
    session: tf.compat.v1.Session,
) -> None:
    processes = _UnmarkedOps()
    horovod = Horovod(processes)
    sparse = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    dense, gathered = horovod.mean([tf.constant([2.0, 6.0]), sparse], ["kernel", "table"], None)
    fetched = [dense, gathered.values, gathered.indices, horovod.total(tf.constant([1, 5]), "micro_batches")]
    for _ in range(2):
        found = session.run(fetched)
        assert [values.tolist() for values in found] == [[2, 6], [[1], [1]], [1, 1], [2, 10]]
    names = ["forms_of_gradients", "gradient_0", "gradient_1_values", "gradient_1_indices", "micro_batches"]
    assert processes.ran == dict.fromkeys(names, 2)
