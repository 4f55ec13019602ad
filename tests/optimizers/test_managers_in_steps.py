"""Managers with further demands on a step, such as the largest magnitude of its gradients; and their own methods."""

import math
from types import ModuleType

import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    eager_steps,
    for_every_front_end,
    for_every_keras,
    kernel_and_bias,
    optimizer,
    take_step,
    values,
)

import tfmp

#: The scale for a largest gradient of 4: the largest power of two whose product with 4 is at most 65504.
_FOR_4 = 2.0**13

#: The scales after steps with the largest gradients 4, NaN and 1, which follow one overflow. The NaN halves the scale
#: and leaves a margin of 1. After the third step log2 of the magnitudes has been 2 and 0, with a mean of 1 and a
#: deviation of 2, and the exponent of 2**(15.99... - 1 - 3 * 2 - 1) is rounded down.
_AFTER_19 = [_FOR_4, _FOR_4 / 2, 2.0**7]


def _manager() -> tfmp.LogMaxLossScaleManager:
    return tfmp.LogMaxLossScaleManager(init_loss_scale=2**20)


@for_every_keras()
@pytest.mark.parametrize("way", ["eager", "function", "xla"])
def test_true_magnitude_sets_the_scale(keras: ModuleType, way: str) -> None:
    variables = kernel_and_bias(keras)
    opt = tfmp.LossScaleOptimizer(optimizer(keras), _manager())
    opt.build(variables)

    def step(kernel: tf.Tensor) -> None:
        take_step(opt, variables, [tf.fill([2, 2], kernel), tf.ones([2])])

    run = step if way == "eager" else tf.function(step, jit_compile=way == "xla")
    scales = []
    for kernel in (math.inf, -4.0, math.nan, 0.25):
        run(tf.constant(kernel))
        scales.append(float(opt.loss_scale))
    assert scales == [2.0**19, *_AFTER_19]


def test_true_magnitude_sets_the_scale_of_eager_v1() -> None:
    w = tf.Variable(1.0)
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), _manager())
    scales = []
    for factor in (math.inf, -4.0, math.nan, 1.0):
        opt.minimize(lambda factor=factor: w * factor, var_list=[w])
        scales.append(float(opt.loss_scale))
    assert scales == [2.0**19, *_AFTER_19]


@pytest.mark.graph
def test_true_magnitude_sets_the_scale_in_a_graph(session: tf.compat.v1.Session) -> None:
    factor = tf.compat.v1.placeholder(tf.float32, [])
    w = tf.compat.v1.get_variable("w", initializer=1.0)
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), _manager())
    train_op = opt.minimize(w * factor)
    session.run(tf.compat.v1.global_variables_initializer())
    scales = []
    for fed in (math.inf, -4.0, math.nan, 1.0):
        session.run(train_op, {factor: fed})
        scales.append(session.run("loss_scale:0"))
    assert scales == [2.0**19, *_AFTER_19]


@for_every_keras()
def test_replicas_take_the_largest_of_their_magnitudes(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        kernel, _ = kernel_and_bias(keras)
        opt = tfmp.LossScaleOptimizer(optimizer(keras), _manager())
        opt.build([kernel])

    def step(factors: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        take_step(opt, [kernel], [tf.fill([2, 2], tf.gather(factors, replica))])

    run = tf.function(lambda factors: two_replicas.run(step, [factors]))
    # Keras 2 sums the gradients before the check. The other replica has 0, so that sum and maximum are equal.
    run(tf.constant([0.0, 4.0]))
    assert float(opt.loss_scale) == _FOR_4


@pytest.mark.graph
def test_replicas_of_a_graph_take_the_largest_of_their_magnitudes(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session, two_replicas.scope():
        factors = tf.compat.v1.placeholder(tf.float32, [2])
        w = tf.compat.v1.get_variable("w", initializer=1.0)
        opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), _manager())

        def on_replica() -> tf.Operation:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return opt.minimize(w * tf.gather(factors, replica), var_list=[w])

        train_op = tf.group(two_replicas.experimental_local_results(two_replicas.run(on_replica)))
        session.run(tf.compat.v1.global_variables_initializer())
        scales = []
        for fed in ([1.0, math.inf], [0.25, -4.0], [math.nan, 1.0], [-1.0, 0.5]):
            session.run(train_op, {factors: fed})
            scales.append(session.run(opt.loss_scale))
        assert scales == [2.0**19, *_AFTER_19]


@for_every_keras()
@pytest.mark.parametrize("way", ["eager", "function", "xla"])
def test_gradients_that_unscaling_by_a_scale_below_1_makes_infinite_are_found(keras: ModuleType, way: str) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(2.0**-10, 1000, min_loss_scale=2.0**-20)
    variables = kernel_and_bias(keras)
    before = values(variables)
    opt = tfmp.LossScaleOptimizer(optimizer(keras), manager)
    opt.build(variables)

    def step(kernel: tf.Tensor) -> None:
        opt.scale_loss(tf.constant(1.0))
        opt.apply_gradients(zip([tf.fill([2, 2], kernel), tf.zeros([2])], variables, strict=True))

    run = step if way == "eager" else tf.function(step, jit_compile=way == "xla")
    # The scaled gradient is finite, and the unscaled one is infinite.
    run(tf.constant(2.0**120))
    assert (values(variables), int(opt.skipped_steps)) == (before, 1)
    (report,) = opt.overflow_reports()
    assert report.last.numpy().tolist() == [[4, 0, 0], [0, 0, 0]]
    run(tf.constant(2.0**-10))
    assert values(variables) == [[[0.5, 1.5], [2.5, 3.5]], [5, 6]]


class _Halving(tfmp.LossScaleManager):
    """A custom manager that declares no lower bound for its scale."""

    def __init__(self, loss_scale: float) -> None:
        super().__init__()
        self.loss_scale = tf.Variable(loss_scale, trainable=False)

    def get_loss_scale(self) -> tf.Tensor:
        return self.loss_scale.read_value()

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        return self.loss_scale.assign(self.loss_scale * tf.where(finite_grads, 1.0, 0.5))


@for_every_keras()
def test_overflow_is_found_if_the_manager_has_no_lower_bound_for_its_scale(keras: ModuleType) -> None:
    # One manager is custom. The state of the other comes from a checkpoint of a manager with a lower bound.
    restored = tfmp.ExponentialUpdateLossScaleManager(1024, 1000)
    restored.state.assign(restored.state.read()._replace(loss_scale=tf.constant(2.0**-10)))
    for manager in (_Halving(2.0**-10), restored):
        variables = kernel_and_bias(keras)
        before = values(variables)
        opt = tfmp.LossScaleOptimizer(optimizer(keras), manager)
        opt.build(variables)
        opt.scale_loss(tf.constant(1.0))
        opt.apply_gradients(zip([tf.fill([2, 2], 2.0**120), tf.zeros([2])], variables, strict=True))
        assert (values(variables), int(opt.skipped_steps)) == (before, 1)


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("method", ["update_loss_scale", "next_state", "note_step"])
def test_what_replaces_a_method_of_a_manager_is_called_in_each_later_step(
    keras: ModuleType, front_end: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, seen = tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000), []
    _, step = eager_steps(keras, front_end, manager)
    grad = tf.constant([1.0, 1.0])
    for _ in range(70):
        step(grad)
    original = getattr(manager, method)
    with monkeypatch.context() as patched:
        patched.setattr(manager, method, lambda *args: [seen.append(bool(args[-1])), original(*args)][1])
        for factor in (1.0, math.inf, 1.0):
            step(grad * factor)
    step(grad)
    assert seen == [True, False, True]
    assert [int(count) for count in manager.get_status()[3:6]] == [74, 73, 1]
