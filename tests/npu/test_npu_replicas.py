"""The NPU bridge's optimizer on the replicas of a strategy."""

import math

import pytest
import tensorflow as tf

import tfmp.npu

# The sum of two such gradients is infinite.
_HUGE = 2.0**127


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("checks", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("grads", [(1.0, math.inf), (_HUGE, _HUGE)], ids=["one infinite", "infinite sum"])
def test_without_overflow_check_replicas_apply_every_step(
    two_replicas: tf.distribute.MirroredStrategy, grads: tuple[float, float], checks: bool, compiled: bool
) -> None:
    with two_replicas.scope():
        weight = tf.Variable(1.0)
        global_step = tf.Variable(0, dtype=tf.int64)
        manager = tfmp.npu.FixedLossScaleManager(1, enable_overflow_check=checks)
    optimizer = tfmp.npu.NPULossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)

    def on_replica() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.minimize(lambda: weight * tf.gather(grads, replica), global_step, [weight])

    step = tf.function(on_replica) if compiled else on_replica
    two_replicas.run(step)
    expected = 1.0 if checks else -math.inf
    assert [float(value) for value in two_replicas.experimental_local_results(weight)] == [expected] * 2
    status = manager.get_status()
    counts = [global_step, status.applied_steps, status.skipped_steps]
    assert [int(count.numpy()) for count in counts] == ([0, 0, 1] if checks else [1, 1, 0])
