"""The replicas of a strategy agree by one collective, and act alike."""

import math
import time
from typing import Any

import pytest
import tensorflow as tf
from recording_adapters import take_step

import tfmp
from tfmp.core.distribute import Mirrored, MirroredWorkers, current_distribution
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Gradients


def test_half_precision_aggregation_is_refused_under_a_strategy(two_replicas: tf.distribute.MirroredStrategy) -> None:
    def mean() -> None:
        current_distribution(is_distributed=True).mean([tf.constant(1.0)], ["kernel"], tf.float16)

    with pytest.raises(NotImplementedError, match="aggregation_dtype='float16' is for Horovod: under a tf"):
        two_replicas.run(mean)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("bad_replica", [None, 0, 1])
def test_overflow_on_one_replica_skips_all(
    two_replicas: tf.distribute.MirroredStrategy, bad_replica: int | None, compiled: bool
) -> None:
    with two_replicas.scope():
        weight = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
        manager = tfmp.ExponentialUpdateLossScaleManager(8, 1, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=True)

    def step() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        overflows = tf.equal(replica, -1 if bad_replica is None else bad_replica)
        grad = tf.where(overflows, float("inf"), 2.0)
        take_step(scaler, [grad], ["weight"], lambda grads: tf.group(weight.assign_add(grads[0])))

    run = (lambda: two_replicas.run(step)) if not compiled else tf.function(lambda: two_replicas.run(step))
    run()
    applied = bad_replica is None
    assert [float(value) for value in two_replicas.experimental_local_results(weight)] == [5.0 if applied else 1.0] * 2
    assert float(manager.get_loss_scale()) == (16 if applied else 4)
    counts = manager.get_status()
    assert (int(counts.applied_steps), int(counts.skipped_steps)) == ((1, 0) if applied else (0, 1))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_total_and_maximum_are_of_all_replicas(two_replicas: tf.distribute.MirroredStrategy, compiled: bool) -> None:
    def of_replica() -> tuple[tf.Tensor, tf.Tensor]:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        values = tf.stack([1.0, 4 * replica, -replica])
        distribution = current_distribution(is_distributed=True)
        return distribution.total(values, "values"), distribution.maximum(values, "values")

    def run() -> list[tuple[tf.Tensor, tf.Tensor]]:
        total, maximum = map(two_replicas.experimental_local_results, two_replicas.run(of_replica))
        return list(zip(total, maximum, strict=True))

    for total, maximum in (tf.function(run, autograph=False) if compiled else run)():
        assert total.numpy().tolist() == [2, 4, -1]
        assert maximum.numpy().tolist() == [1, 4, 0]


class _CountsReductions(tf.distribute.ReductionToOneDevice):
    """Counts the collectives of a step as they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.built = 0

    def reduce_implementation(self, *args: Any, **kwargs: Any) -> Any:
        self.built += 1
        return super().reduce_implementation(*args, **kwargs)


@pytest.mark.parametrize("distribution", [Mirrored(), MirroredWorkers()], ids=repr)
@pytest.mark.parametrize("with_max_abs", [False, True])
@pytest.mark.parametrize("bad_replica", [None, 0, 1])
def test_replicas_agree_by_one_collective(distribution: Mirrored, with_max_abs: bool, bad_replica: int | None) -> None:
    reductions = _CountsReductions()
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=reductions)

    def agree() -> tuple[tf.Tensor, tf.Tensor]:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        usable = tf.not_equal(replica, -1 if bad_replica is None else bad_replica)
        max_abs = tf.cast(replica, tf.float32) + 2 if with_max_abs else None
        applied, largest = distribution.agree(usable, max_abs, [tf.constant(1.0), None], ["kernel", "bias"])
        assert (largest is not None) is with_max_abs
        return applied, tf.zeros([]) if largest is None else largest

    # As in the optimizers: AutoGraph does not convert what tfmp builds.
    @tf.function(autograph=False)
    def run() -> tuple[Any, Any]:
        applied, largest = strategy.run(agree)
        return strategy.experimental_local_results(applied), strategy.experimental_local_results(largest)

    applied, largest = run()
    assert reductions.built == 1
    assert [bool(value) for value in applied] == [bad_replica is None] * 2
    assert [float(value) for value in largest] == [3 if with_max_abs else 0] * 2


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_magnitude_of_an_overflow_does_not_hide_the_flag(
    two_replicas: tf.distribute.MirroredStrategy, bad: float
) -> None:
    def agree() -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        max_abs = tf.where(tf.equal(replica, 1), bad, 2.0)
        applied, _ = Mirrored().agree(tf.math.is_finite(max_abs), max_abs, [tf.constant(1.0)], ["kernel"])
        return applied

    found = tf.function(lambda: two_replicas.experimental_local_results(two_replicas.run(agree)), autograph=False)()
    assert [bool(applied) for applied in found] == [False, False]


def test_workers_that_lack_a_gradient_are_named(two_replicas: tf.distribute.MirroredStrategy) -> None:
    def agree() -> tf.Tensor:
        is_first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        grads = [tf.constant(1.0), tf.constant(1.0) if is_first else None]
        return MirroredWorkers().agree(tf.constant(True), None, grads, ["kernel", "bias"])[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)the workers differ.*bias"):
        two_replicas.run(agree)


@pytest.mark.parametrize("flag", [True, False])
def test_each_replica_acts_on_its_own_gradients_and_one_for_all(
    two_replicas: tf.distribute.MirroredStrategy, flag: bool
) -> None:
    with two_replicas.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        steps = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def step() -> None:
        grad = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) + 1
        Mirrored().conditional_update(
            tf.constant(flag),
            [grad],
            lambda grads: tf.group(total.assign_add(grads[0])),
            lambda grads: tf.group(total.assign_sub(grads[0])),
        )
        Mirrored().once(lambda: tf.group(steps.assign_add(1)))

    tf.function(lambda: two_replicas.run(step), autograph=False)()
    assert [float(value) for value in two_replicas.experimental_local_results(total)] == [3 if flag else -3] * 2
    assert [int(value) for value in two_replicas.experimental_local_results(steps)] == [1, 1]


@pytest.mark.graph
def test_no_replica_of_a_graph_acts_before_all_have_found_their_flags() -> None:
    events: list[str] = []

    def find(replica: int) -> bool:
        time.sleep(0.2 * replica)
        events.append("found")
        return True

    def act() -> bool:
        events.append("acted")
        return True

    def call_act(grads: Gradients) -> tf.Operation:
        del grads
        return tf.group(tf.numpy_function(act, [], tf.bool))

    def step() -> tf.Operation:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        flag = tf.ensure_shape(tf.numpy_function(find, [replica], tf.bool), [])
        return Mirrored().conditional_update(flag, [], call_act, call_act)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        strategy = tf.distribute.MirroredStrategy(
            ["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
        session.run(strategy.experimental_local_results(strategy.run(step)))
    assert events == ["found", "found", "acted", "acted"]


def test_optimizer_sums_the_gradients_of_all_replicas(two_replicas: tf.distribute.MirroredStrategy) -> None:
    grads, found = [tf.constant(1.0), None], []
    two_replicas.run(lambda: found.append((Mirrored().num_summed, Mirrored().mean(grads, ["kernel", "bias"], None))))
    assert found == [(2, grads), (2, grads)]
