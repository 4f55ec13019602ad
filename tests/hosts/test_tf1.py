"""Optimizers of TensorFlow 1 in eager code and on replicas: the global step, and the gradients that they are given."""

from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.bert import AdamWeightDecayOptimizer

tf1 = tf.compat.v1


class _Forgetful(tf1.train.GradientDescentOptimizer):
    """Does not advance the global step, as the optimizer of BERT did not."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        del global_step
        return super().apply_gradients(grads_and_vars, name=name)


@pytest.mark.parametrize("way", ["eager", "function", "replicas"])
@pytest.mark.parametrize("optimizer", [tf1.train.GradientDescentOptimizer, _Forgetful])
def test_global_step_goes_up_by_exactly_one(
    optimizer: type, way: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    strategy = two_replicas if way == "replicas" else tf.distribute.get_strategy()
    with strategy.scope():
        weight = tf.Variable(1.0)
        global_step = tf.Variable(5, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    opt = tfmp.LossScaleOptimizer(optimizer(0.5), tfmp.FixedLossScaleManager(8), is_distributed=way == "replicas")

    def step(factor: tf.Tensor) -> None:
        opt.minimize(lambda: weight * factor, global_step, var_list=[weight])

    run = step if way == "eager" else tf.function(lambda factor: strategy.run(step, args=(factor,)))
    for factor in (0.25, float("inf"), 0.25):
        run(tf.constant(factor))
    weights, steps = (strategy.experimental_local_results(each) for each in (weight, global_step))
    assert {int(each) for each in steps} == {7}
    # The optimizer sums the gradients of replicas, of which each has a loss of its own.
    assert len({float(each) for each in weights}) == 1
    assert float(weights[0]) < 1


def test_optimizer_that_keeps_float32_is_given_it_for_a_variable_in_half_precision() -> None:
    moved = []
    for inner in (AdamWeightDecayOptimizer(0.5), tf1.train.GradientDescentOptimizer(2.0**-17)):
        weight = tf.Variable(1.0, dtype=tf.float16)
        opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1))
        opt.apply_gradients([(tf.constant(70000.0), weight)])
        moved.append((float(weight) != 1, int(opt.skipped_steps)))
    # The gradient is infinite in float16.
    assert moved == [(True, 0), (False, 1)]


def test_optimizer_is_given_variables_without_gradients_by_the_wrapper_alone() -> None:
    class Recording(tf1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
            given.extend(grad is None for grad, _ in grads_and_vars)
            return super().apply_gradients(grads_and_vars, global_step, name)

    given: list[bool] = []
    pairs = [(None, tf.Variable(1.0)), (tf.constant(1.0), tf.Variable(1.0))]
    tfmp.LossScaleOptimizer(Recording(0.5), tfmp.FixedLossScaleManager(1)).apply_gradients(pairs)
    scaler = tfmp.GradScaler(1)
    scaler.scale(tf.constant(1.0))
    scaler.step(Recording(0.5), pairs)
    assert given == [True, False, False]
