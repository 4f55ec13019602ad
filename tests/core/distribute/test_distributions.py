"""How replicas act as one: in one process, in the threads of a strategy, and in processes of Horovod.

Processes of Horovod itself train in `tests/optimizers/test_horovod.py`; here stand-ins look as Horovod's (0.28.1) do.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stand_ins import run_horovod

from tfmp.core.distribute import (
    Horovod,
    Mirrored,
    MirroredWorkers,
    current_distribution,
    current_replica,
    horovod_detection,
)
from tfmp.types import Gradients

tf1 = tf.compat.v1

in_eager_code_and_functions = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


def _replica() -> tf.Tensor:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _replicas(reduction: tf.distribute.CrossDeviceOps) -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=reduction)


# In the threads of a strategy.


@in_eager_code_and_functions
def test_totals_are_of_all_replicas(two_replicas: tf.distribute.MirroredStrategy, compiled: bool) -> None:
    grads = [tf.constant(1.0), None]

    def of_replica() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        replica, distribution = tf.cast(_replica(), tf.float32), current_distribution(is_distributed=True)
        values = tf.stack([1.0, 4 * replica, -replica])
        # Optimizers sum the gradients themselves.
        assert (distribution.num_summed, distribution.mean(grads, ["a", "b"], None)) == (2, grads)
        summed, none = distribution.sums([values, None], ["a", "b"])
        assert none is None
        return distribution.total(values, "values"), distribution.maximum(values, "values"), summed

    def run() -> list[Any]:
        return [two_replicas.experimental_local_results(each) for each in two_replicas.run(of_replica)]

    found = (tf.function(run, autograph=False) if compiled else run)()
    for values, expected in zip(found, [[2, 4, -1], [1, 4, 0], [2, 4, -1]], strict=True):
        assert [each.numpy().tolist() for each in values] == [expected] * 2


class _CountsReductions(tf.distribute.ReductionToOneDevice):
    """Counts the collectives of a step as they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.built = 0

    def reduce_implementation(self, *args: Any, **kwargs: Any) -> Any:
        self.built += 1
        return super().reduce_implementation(*args, **kwargs)


@pytest.mark.parametrize("distribution", [Mirrored(), MirroredWorkers()], ids=repr)
# Without a magnitude; with one; with one that the flag is not hidden by.
@pytest.mark.parametrize("second", [None, 3.0, math.inf, math.nan])
@pytest.mark.parametrize("bad_replica", [None, 0, 1])
def test_replicas_agree_at_once(distribution: Mirrored, second: float | None, bad_replica: int | None) -> None:
    reductions = _CountsReductions()
    strategy = _replicas(reductions)

    def agree() -> tuple[tf.Tensor, tf.Tensor]:
        unusable = tf.equal(_replica(), -1 if bad_replica is None else bad_replica)
        max_abs = [] if second is None else [tf.where(tf.equal(_replica(), 1), second, 2.0)]
        agreed, *largest = distribution.agree([unusable, *max_abs], [tf.constant(1.0), None], ["kernel", "bias"])
        assert len(largest) == len(max_abs)
        return tf.logical_not(agreed), largest[0] if largest else tf.zeros([])

    # As in the optimizers: AutoGraph does not convert what tfmp builds.
    @tf.function(autograph=False)
    def run() -> tuple[Any, Any]:
        applied, largest = strategy.run(agree)
        return strategy.experimental_local_results(applied), strategy.experimental_local_results(largest)

    applied, largest = run()
    assert reductions.built == 1
    assert [bool(value) for value in applied] == [bad_replica is None] * 2
    if second is None or math.isfinite(second):
        assert [float(value) for value in largest] == [second or 0] * 2


@in_eager_code_and_functions
def test_workers_whose_gradients_differ_are_told_of_which_variables(
    two_replicas: tf.distribute.MirroredStrategy, compiled: bool
) -> None:
    dense, rows = tf.ones([1]), tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([1]))

    def agree() -> tf.Tensor:
        grads = [dense, dense, rows] if current_replica() == 0 else [dense, None, dense]
        return MirroredWorkers().agree([tf.constant(False)], grads, ["dense", "lacking", "sparse"])[0]

    def run() -> None:
        two_replicas.run(agree)

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        (tf.function(run, autograph=False) if compiled else run)()
    assert re.search(r"\bthe workers differ in whether .* or sparse:\W", raised.value.message)
    assert "lacking" in raised.value.message
    assert "sparse" in raised.value.message.replace("None, or sparse", "")
    assert "dense" not in raised.value.message


@pytest.mark.graph
def test_no_replica_of_a_graph_acts_before_all_have_found_their_flags() -> None:
    events: list[str] = []

    def find(replica: int) -> bool:
        time.sleep(0.2 * replica)
        events.append("found")
        return True

    def call_act(grads: Gradients) -> tf.Operation:
        del grads
        return tf.group(tf.numpy_function(lambda: events.append("acted") or True, [], tf.bool))

    def step() -> tf.Operation:
        flag = tf.ensure_shape(tf.numpy_function(find, [_replica()], tf.bool), [])
        return Mirrored().conditional_update(flag, [], call_act, call_act)

    with tf.Graph().as_default(), tf1.Session() as session:
        strategy = _replicas(tf.distribute.ReductionToOneDevice())
        session.run(strategy.experimental_local_results(strategy.run(step)))
    assert events == ["found", "found", "acted", "acted"]


# In processes of Horovod.


class _Processes:
    """The functions of `horovod.tensorflow` on the first of two processes; keeps the names and types of what it sent.

    It sends by ops that are not marked as stateful, as Horovod's are not, and counts how often each of them runs.

    Args:
        alike: Whether the other process sends the same values; otherwise it has no gradients, and sends zeros.
    """

    Sum = "sum"

    def __init__(self, *, alike: bool) -> None:
        self._others = 1 if alike else 0
        self.sent: list[tuple[str, tf.DType]] = []
        self.ran: Counter[str] = Counter()

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def allreduce(self, values: tf.Tensor, op: Any, name: str) -> tf.Tensor:
        assert op == self.Sum
        values = self._send(values, name)
        if name == "forms_of_gradients" and not self._others:
            # In its own row, the other process says that it has the opposite of each form.
            return tf.stack([values[0], tf.stack([tf.zeros_like(values[0][0]), tf.ones_like(values[0][0])])])
        return values + values * self._others

    def allgather(self, values: tf.Tensor, name: str) -> tf.Tensor:
        values = self._send(values, name)
        return tf.concat([values, values * self._others], axis=0)

    def _send(self, values: tf.Tensor, name: str) -> tf.Tensor:
        def run(array: np.ndarray) -> np.ndarray:
            self.ran[name] += 1
            return array

        self.sent.append((name, values.dtype))
        return tf.ensure_shape(tf.numpy_function(run, [values], values.dtype, stateful=False), values.shape)


@pytest.mark.parametrize("dtype", [None, tf.float16])
def test_mean_travels_in_the_type_that_is_asked_for(dtype: tf.DType | None) -> None:
    processes = _Processes(alike=True)
    sparse = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    dense, none, gathered = Horovod(processes).mean([tf.constant([2.0, 6.0]), None, sparse], ["a", "b", "c"], dtype)
    assert dense.numpy().tolist() == [2, 6]
    assert none is None
    # Rows of all processes, each divided by their number.
    assert [each.numpy().tolist() for each in (gathered.values, gathered.indices, gathered.dense_shape)] == [
        [[1], [1]],
        [1, 1],
        [3, 1],
    ]
    assert {dense.dtype, gathered.dtype} == {tf.float32}
    travelled = dtype or tf.float32
    assert processes.sent == [
        ("forms_of_gradients", tf.float32),
        ("gradient_0", travelled),
        ("gradient_2_values", travelled),
        ("gradient_2_indices", tf.int32),
    ]
    # The sum does not overflow where the mean fits.
    largest = tf.constant([tf.float16.max], tf.float16)
    assert Horovod(processes).mean([largest], ["kernel"], None)[0].numpy().tolist() == largest.numpy().tolist()


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("max_abs", [None, 3.0])
def test_processes_agree_by_one_collective(usable: bool, max_abs: float | None) -> None:
    processes, given = _Processes(alike=False), [] if max_abs is None else [tf.constant(max_abs)]
    unusable, *largest = Horovod(processes).agree([tf.constant(not usable), *given], [], [])
    assert (bool(unusable), [float(each) for each in largest]) == (not usable, [max_abs] * len(given))
    assert processes.sent == [("step_result", tf.float32)]


def test_total_and_maximum_are_named_and_processes_that_differ_in_what_has_a_gradient_name_it() -> None:
    processes, values = _Processes(alike=False), tf.constant([1, 5], tf.int64)
    horovod = Horovod(processes)
    assert horovod.total(values, "micro_batches").numpy().tolist() == [1, 5]
    assert horovod.maximum(values, "overflow_counts").numpy().tolist() == [1, 5]
    assert [name for name, _ in processes.sent] == ["micro_batches", "overflow_counts"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)the workers differ.*kernel"):
        horovod.mean([tf.constant([1.0]), None], ["kernel", "bias"], None)


@pytest.mark.graph
def test_constants_are_sent_whenever_the_graph_runs_and_not_while_it_is_optimized(session: tf1.Session) -> None:
    processes = _Processes(alike=True)
    horovod = Horovod(processes)
    sparse = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([3, 1]))
    dense, gathered = horovod.mean([tf.constant([2.0, 6.0]), sparse], ["kernel", "table"], None)
    fetched = [dense, gathered.values, gathered.indices, horovod.total(tf.constant([1, 5]), "micro_batches")]
    for _ in range(2):
        found = session.run(fetched)
        assert [values.tolist() for values in found] == [[2, 6], [[1], [1]], [1, 1], [2, 10]]
    names = ["forms_of_gradients", "gradient_0", "gradient_1_values", "gradient_1_indices", "micro_batches"]
    assert processes.ran == dict.fromkeys(names, 2)


# Which of these a step is part of.


@pytest.mark.parametrize("is_distributed", [False, True])
def test_replicas_are_found_with_either_setting_and_not_beside_several_processes_of_horovod(
    two_replicas: tf.distribute.MirroredStrategy, is_distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(strategy: tf.distribute.Strategy) -> set[str]:
        seen: list[str] = []
        strategy.run(lambda: seen.append(repr(current_distribution(is_distributed))))
        return set(seen)

    run_horovod(monkeypatch, 1)
    assert found(two_replicas) == {"Mirrored()"}
    # Replicas of workers are told from those of one process.
    assert found(tf.distribute.MultiWorkerMirroredStrategy()) == {"MirroredWorkers()"}
    # Outside of a strategy a process is alone, unless the user says that Horovod's processes train together.
    assert repr(current_distribution(is_distributed)) == "SingleProcess()"
    run_horovod(monkeypatch, 2)
    assert repr(current_distribution(is_distributed)) == ("Horovod()" if is_distributed else "SingleProcess()")
    with pytest.raises(NotImplementedError, match="Horovod runs 2 processes, and MirroredStrategy is active in this"):
        found(two_replicas)


def test_what_cannot_be_distributed_is_refused(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with pytest.raises(ValueError, match=r"is_distributed=True, and nothing distributes: call hvd\.init"):
        current_distribution(is_distributed=True)
    unknown = tf.distribute.experimental.CentralStorageStrategy()
    with unknown.scope(), pytest.raises(NotImplementedError, match=f"does not support {type(unknown).__name__}"):
        current_distribution(is_distributed=False)
    with two_replicas.scope(), pytest.raises(RuntimeError, match=r"inside strategy\.run"):
        current_distribution(is_distributed=False)
    with pytest.raises(NotImplementedError, match="aggregation_dtype='float16' is for Horovod: under a tf"):
        two_replicas.run(lambda: Mirrored().mean([tf.constant(1.0)], ["kernel"], tf.float16))


def test_only_what_a_strategy_runs_is_on_a_replica(two_replicas: tf.distribute.MirroredStrategy) -> None:
    seen = [current_replica()]
    with two_replicas.scope():
        seen.append(current_replica())
    two_replicas.run(lambda: seen.append(current_replica()))
    assert seen == [None, None, 0, 1]
    found = []

    @tf.function
    def trace(number: tf.Tensor) -> None:
        # Its number is known only when the function runs.
        with tf.distribute.ReplicaContext(two_replicas, number):
            found.append(current_replica())

    trace(tf.constant(1))
    assert found == [None]


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(0.5)


class _Distributed:
    """Hands its steps on to the optimizer that it wraps."""

    __module__ = "horovod.tensorflow"

    def __init__(self, opt: Any, helper: object | None = None) -> None:
        self._optimizer = opt
        self._agg_helper = helper

    def apply(self, function: Callable[[], Any]) -> Any:
        return function()


class _DistributedAdasumOptimizer(_Distributed):
    __module__ = "horovod.tensorflow"


class _DistributedOfKeras:
    """Derived from the user's optimizer, as Horovod's optimizers for Keras are; it wraps nothing."""

    __module__ = "horovod.tensorflow.keras"

    apply = _Distributed.apply


class _Lookalike(_Distributed):
    """Of a package whose name only begins as Horovod's does."""

    __module__ = "horovod_tools.optimizers"


def test_optimizer_is_horovods_by_the_package_of_its_class_and_the_one_inside_is_found() -> None:
    opt = _sgd()
    assert horovod_detection.is_horovods(_DistributedOfKeras())
    assert horovod_detection.is_horovods(_Distributed(opt))
    assert horovod_detection.without_horovods(_Distributed(opt)) is opt
    for alone in (opt, _Lookalike(opt), _DistributedOfKeras()):
        assert horovod_detection.is_horovods(alone) is isinstance(alone, _DistributedOfKeras)
        assert horovod_detection.without_horovods(alone) is alone
        horovod_detection.refuse_unsupported_horovods(alone)


def test_optimizers_that_do_not_average_each_step_are_refused() -> None:
    horovod_detection.refuse_unsupported_horovods(_Distributed(_sgd()))
    with pytest.raises(ValueError, match="leave backward_passes_per_step at 1"):
        horovod_detection.refuse_unsupported_horovods(_Distributed(_sgd(), helper=object()))
    with pytest.raises(ValueError, match=r"does not average gradients: use op=hvd\.Average"):
        horovod_detection.refuse_unsupported_horovods(_DistributedAdasumOptimizer(_sgd()))


def test_call_by_the_wrapper_of_this_optimizer_is_recognized() -> None:
    opt, other = _sgd(), _sgd()
    assert not horovod_detection.called_by_horovods(opt)
    assert _Distributed(opt).apply(lambda: horovod_detection.called_by_horovods(opt))
    for caller in (_Distributed(other), _DistributedOfKeras()):
        assert not caller.apply(lambda: horovod_detection.called_by_horovods(opt))


def test_horovod_runs_if_the_program_has_initialized_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run_horovod(monkeypatch, 2, is_initialized=False)
    assert horovod_detection.running_horovod() is None
    horovod = run_horovod(monkeypatch, 2)
    assert horovod_detection.running_horovod() is horovod
