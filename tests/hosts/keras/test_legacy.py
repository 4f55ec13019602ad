"""The adapter for legacy optimizers: what it makes before a step, who sums, and who counts skipped steps."""

from types import ModuleType

import pytest
import tensorflow as tf
from kerases import for_every_keras

from tfmp.hosts.keras.legacy import LegacyAdapter

pytestmark = pytest.mark.essential

_for_every_keras_2 = for_every_keras("keras2", "tf_keras")


@_for_every_keras_2
def test_variables_are_made_before_the_step(keras: ModuleType) -> None:
    opt, weight = keras.optimizers.legacy.Adam(0.5), tf.Variable([1.0], name="kernel")
    LegacyAdapter(opt, [weight]).prepare([weight])
    names = [variable.name for variable in opt.variables()]
    assert names == ["Adam/iter:0", "Adam/kernel/m:0", "Adam/kernel/v:0"]
    LegacyAdapter(opt, [weight]).apply([tf.constant([1.0])])
    assert [variable.name for variable in opt.variables()] == names
    assert int(opt.iterations) == 1


@_for_every_keras_2
def test_gradients_are_left_for_the_optimizer_to_sum_unless_they_are_summed(keras: ModuleType) -> None:
    opt, weight = keras.optimizers.legacy.SGD(0.5), tf.Variable([1.0])
    grads = [tf.constant([1.0])]
    adapter = LegacyAdapter(opt, [weight])
    assert (adapter.sums_first, adapter.reduce(grads) is grads) == (False, True)
    assert LegacyAdapter(opt, [weight], is_summed=True).sums_first
    averaging = LegacyAdapter(opt, [weight], average=lambda grads: [grad / 2 for grad in grads])
    assert [grad.numpy().tolist() for grad in averaging.reduce(grads)] == [[0.5]]


@_for_every_keras_2
def test_skipped_step_counts_only_if_it_is_to(keras: ModuleType) -> None:
    opt, weight = keras.optimizers.legacy.SGD(0.5), tf.Variable([1.0])
    counts = []
    for counts_skipped_steps in (False, True):
        adapter = LegacyAdapter(opt, [weight], counts_skipped_steps=counts_skipped_steps)
        for applied in (False, True):
            adapter.on_step(tf.constant(applied))
            counts.append(int(opt.iterations))
    assert counts == [0, 0, 1, 1]
