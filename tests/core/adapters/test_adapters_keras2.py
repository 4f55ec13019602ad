"""Optimizers of Keras 2: sums over replicas before the check, and `iterations` with skipped steps."""

from types import ModuleType

import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, values, variable

from tfmp.core.adapters import Keras2Adapter

pytestmark = pytest.mark.essential

_for_every_keras_2 = for_every_keras("keras2", "tf_keras")


@_for_every_keras_2
def test_gradients_are_applied_and_the_step_is_counted(keras: ModuleType) -> None:
    opt, variables = optimizer(keras), [variable(keras, [1.0, 2.0]), variable(keras, [3.0], "bias")]
    adapter = Keras2Adapter(opt, variables)
    adapter.prepare(variables)
    adapter.apply([tf.constant([1.0, 1.0]), tf.constant([2.0])])
    assert values(variables) == [[0.5, 1.5], [2]]
    assert int(opt.iterations) == 1


@_for_every_keras_2
def test_iterations_count_skipped_steps_only_if_they_are_to(keras: ModuleType) -> None:
    opt, kernel = optimizer(keras), variable(keras, 1.0)
    assert Keras2Adapter(opt, [kernel]).on_step(tf.constant(False)) is None
    assert int(opt.iterations) == 0
    adapter = Keras2Adapter(opt, [kernel], counts_skipped_steps=True)
    iterations = []
    for applied in (False, True, False):
        adapter.on_step(tf.constant(applied))
        iterations.append(int(opt.iterations))
    # The optimizer itself counts a step that it applies.
    assert iterations == [1, 1, 2]


@_for_every_keras_2
@pytest.mark.parametrize("sums_first", [True, False])
def test_reduce_sums_over_replicas_unless_gradients_are_summed_already(
    keras: ModuleType, sums_first: bool, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        opt, kernel = optimizer(keras), variable(keras, 1.0)

    def reduced() -> tf.Tensor:
        adapter = Keras2Adapter(opt, [kernel], sums_first=sums_first)
        # Either way the core must not expect the optimizer to sum when it applies them.
        assert adapter.sums_first
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        (grad,) = adapter.reduce([tf.cast(replica, tf.float32) + 1])
        return grad

    found = tf.function(lambda: two_replicas.experimental_local_results(two_replicas.run(reduced)))()
    assert [float(grad) for grad in found] == ([3, 3] if sums_first else [1, 2])


@_for_every_keras_2
def test_reduce_averages_what_is_not_averaged_yet(keras: ModuleType) -> None:
    adapter = Keras2Adapter(optimizer(keras), [variable(keras, 1.0)], average=lambda grads: [grads[0] / 2])
    assert [float(grad) for grad in adapter.reduce([tf.constant(3.0)])] == [1.5]


@_for_every_keras_2
def test_replicas_apply_a_sum_as_it_is(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        opt, kernel = optimizer(keras), variable(keras, 4.0)
        opt.build([kernel])

    def step() -> None:
        Keras2Adapter(opt, [kernel]).apply([tf.constant(2.0)])

    tf.function(lambda: two_replicas.run(step))()
    assert [float(value) for value in two_replicas.experimental_local_results(kernel)] == [3, 3]
