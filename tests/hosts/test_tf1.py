"""Optimizers of TensorFlow 1: the global step, slots, and the types of gradients."""

from typing import Any

import pytest
import tensorflow as tf

from tfmp.bert import AdamWeightDecayOptimizer
from tfmp.core.distribute import SingleProcess, current_distribution
from tfmp.hosts.tf1 import GlobalStepCounter, TF1Adapter

pytestmark = pytest.mark.essential

tf1 = tf.compat.v1


class _Forgetful(tf1.train.GradientDescentOptimizer):
    """Does not advance the global step, as the optimizer of BERT did not."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        del global_step
        return super().apply_gradients(grads_and_vars, name=name)


_for_every_habit = pytest.mark.parametrize("optimizer", [tf1.train.GradientDescentOptimizer, _Forgetful])


@_for_every_habit
def test_global_step_goes_up_by_exactly_one_in_eager_mode(optimizer: type) -> None:
    weight, global_step = tf.Variable(1.0), tf.Variable(5, dtype=tf.int64)
    adapter = TF1Adapter(optimizer(0.5), [weight], counter=GlobalStepCounter(global_step, SingleProcess()))
    for _ in range(2):
        adapter.apply([tf.constant(1.0)])
    assert (float(weight), int(global_step)) == (0, 7)


@pytest.mark.graph
@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
@_for_every_habit
def test_global_step_goes_up_by_exactly_one_in_a_graph(
    session: tf1.Session, optimizer: type, use_resource: bool
) -> None:
    weight = tf1.Variable(1.0, use_resource=use_resource)
    global_step = tf1.Variable(tf.constant(5, tf.int64), use_resource=use_resource)
    adapter = TF1Adapter(optimizer(0.5), [weight], counter=GlobalStepCounter(global_step, SingleProcess()))
    op = adapter.apply([tf.constant(1.0)])
    session.run([weight.initializer, global_step.initializer])
    for _ in range(2):
        session.run(op)
    assert session.run([weight, global_step]) == [0, 7]


@_for_every_habit
def test_global_step_of_two_replicas_goes_up_by_exactly_one(
    two_replicas: tf.distribute.MirroredStrategy, optimizer: type
) -> None:
    with two_replicas.scope():
        weight = tf.Variable(1.0)
        global_step = tf.Variable(5, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    opt = optimizer(0.5)

    def step() -> None:
        counter = GlobalStepCounter(global_step, current_distribution(is_distributed=True))
        TF1Adapter(opt, [weight], counter=counter).apply([tf.constant(0.25)])

    tf.function(lambda: two_replicas.run(step))()
    # The optimizer sums the gradients of both.
    assert [float(value) for value in two_replicas.experimental_local_results(weight)] == [0.75, 0.75]
    assert [int(value) for value in two_replicas.experimental_local_results(global_step)] == [6, 6]


def test_optimizer_that_keeps_float32_is_given_it_for_a_variable_in_half_precision() -> None:
    weight, grad = tf.Variable(1.0, dtype=tf.float16), tf.constant(70000.0)
    (kept,) = TF1Adapter(AdamWeightDecayOptimizer(0.5), [weight]).typed([grad])
    (cast,) = TF1Adapter(None, [weight]).typed([grad])
    assert kept is grad
    assert (cast.dtype, float(cast)) == (tf.float16, float("inf"))


def test_prepare_makes_slots_in_eager_code() -> None:
    opt, weight = tf1.train.MomentumOptimizer(0.5, 0.5), tf.Variable([1.0, 2.0])
    TF1Adapter(opt, [weight]).prepare([weight])
    assert opt.get_slot(weight, "momentum").numpy().tolist() == [0, 0]


@pytest.mark.graph
def test_prepare_leaves_slots_to_the_graph(session: tf1.Session) -> None:
    del session
    opt, weight = tf1.train.MomentumOptimizer(0.5, 0.5), tf1.Variable([1.0, 2.0])
    TF1Adapter(opt, [weight]).prepare([weight])
    assert opt.variables() == []


@pytest.mark.graph
def test_optimizer_makes_its_variables_in_the_scope_that_is_given(session: tf1.Session) -> None:
    del session
    opt, weight = tf1.train.AdamOptimizer(0.5), tf1.Variable(1.0, name="w")
    adapter = TF1Adapter(opt, [weight], name_scope="train/")
    with tf.name_scope("elsewhere"):
        adapter.apply([tf.constant(1.0)])
    names = {variable.op.name for variable in opt.variables()}
    assert names == {"train/beta1_power", "train/beta2_power", "w/Adam", "w/Adam_1"}


@pytest.mark.parametrize("leaves_out_none", [False, True])
def test_optimizer_is_given_none_unless_it_is_left_out(leaves_out_none: bool) -> None:
    class Recording(tf1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
            given.extend(grad is None for grad, _ in grads_and_vars)
            return super().apply_gradients(grads_and_vars, global_step, name)

    given: list[bool] = []
    adapter = TF1Adapter(Recording(0.5), [tf.Variable(1.0), tf.Variable(1.0)], leaves_out_none=leaves_out_none)
    adapter.apply([None, tf.constant(1.0)])
    assert given == ([False] if leaves_out_none else [True, False])


def test_gradients_that_are_not_averaged_yet_are_averaged_by_the_step() -> None:
    grads = [tf.constant(3.0)]
    assert TF1Adapter(None, [tf.Variable(1.0)]).reduce(grads) is grads
    adapter = TF1Adapter(None, [tf.Variable(1.0)], average=lambda grads: [grads[0] / 2])
    assert [float(grad) for grad in adapter.reduce(grads)] == [1.5]
