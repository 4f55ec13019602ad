import pytest
import tensorflow as tf
from stand_in_horovod import run_horovod

from tfmp.core.distribute import SingleProcess, current_distribution, current_replica, on_replica


def test_without_a_strategy_there_is_one_process() -> None:
    assert isinstance(current_distribution(is_distributed=False), SingleProcess)


@pytest.mark.graph
def test_several_devices_without_a_strategy_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is_distributed=True, and nothing distributes: call hvd\.init"):
        current_distribution(is_distributed=True)


@pytest.mark.parametrize("is_distributed", [False, True])
def test_replicas_are_found_with_either_setting(
    two_replicas: tf.distribute.MirroredStrategy, is_distributed: bool
) -> None:
    found = []
    two_replicas.run(lambda: found.append(repr(current_distribution(is_distributed))))
    assert found == ["Mirrored()", "Mirrored()"]


def test_replicas_of_workers_are_told_from_those_of_one_process() -> None:
    found: list[str] = []
    tf.distribute.MultiWorkerMirroredStrategy().run(lambda: found.append(repr(current_distribution(True))))
    assert set(found) == {"MirroredWorkers()"}


@pytest.mark.parametrize(
    ("size", "is_distributed", "expected"),
    [
        (2, True, "Horovod()"),
        (2, False, "SingleProcess()"),
        (1, True, "SingleProcess()"),
        (1, False, "SingleProcess()"),
    ],
)
def test_horovod_is_used_if_it_runs_several_processes_and_the_user_says_so(
    size: int, is_distributed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_horovod(monkeypatch, size)
    distribution = current_distribution(is_distributed)
    assert repr(distribution) == expected
    assert float(distribution.total(tf.constant(3.0), "values")) == (6 if expected == "Horovod()" else 3)


@pytest.mark.parametrize("is_distributed", [False, True])
def test_strategy_together_with_several_processes_of_horovod_is_refused(
    two_replicas: tf.distribute.MirroredStrategy, is_distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_horovod(monkeypatch, 2)
    with pytest.raises(NotImplementedError, match="Horovod runs 2 processes, and MirroredStrategy is active in this"):
        two_replicas.run(lambda: current_distribution(is_distributed))
    run_horovod(monkeypatch, 1)
    two_replicas.run(lambda: current_distribution(is_distributed))


def test_unknown_strategy_is_refused_by_name() -> None:
    strategy = tf.distribute.experimental.CentralStorageStrategy()
    with strategy.scope(), pytest.raises(NotImplementedError, match=f"does not support {type(strategy).__name__}"):
        current_distribution(is_distributed=False)


def test_cross_replica_context_is_refused(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope(), pytest.raises(RuntimeError, match=r"inside strategy\.run"):
        current_distribution(is_distributed=False)


def test_only_what_a_strategy_runs_is_on_a_replica(two_replicas: tf.distribute.MirroredStrategy) -> None:
    seen = [(on_replica(), current_replica())]
    with two_replicas.scope():
        seen.append((on_replica(), current_replica()))
    two_replicas.run(lambda: seen.append((on_replica(), current_replica())))
    assert seen == [(False, None), (False, None), (True, 0), (True, 1)]


def test_replica_whose_number_is_known_only_when_a_function_runs_has_none(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    found = []

    @tf.function
    def trace(number: tf.Tensor) -> None:
        with tf.distribute.ReplicaContext(two_replicas, number):
            found.append(current_replica())

    trace(tf.constant(1))
    assert found == [None]
