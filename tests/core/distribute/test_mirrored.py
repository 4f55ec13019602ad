import pytest
import tensorflow as tf
from function_steps import take_step

import tfmp
from tfmp.core.distribute import current_distribution
from tfmp.core.step.scaler import LossScaler


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

    for total, maximum in (tf.function(run) if compiled else run)():
        assert total.numpy().tolist() == [2, 4, -1]
        assert maximum.numpy().tolist() == [1, 4, 0]
