"""Updates of Keras on the replicas of a strategy, which its optimizers do as without a wrapper."""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import compiles, for_every_keras, optimizer, variable
from replica_training import values

import tfmp

pytestmark = pytest.mark.essential

_OPTIONS = {
    "": {},
    "weight_decay": {"weight_decay": 0.25},
    "ema": {"use_ema": True, "ema_momentum": 0.5},
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.5},
}


def _options(keras: ModuleType, name: str) -> dict[str, Any]:
    if name == "schedule":
        return {"learning_rate": keras.optimizers.schedules.PolynomialDecay(0.5, 10)}
    return _OPTIONS[name]


#: So many values that a gradient is not read together with others.
_LARGE = 2**13


class _OnReplicas:
    """Variables and an optimizer that takes steps on the replicas of a strategy, each with gradients of its own.

    Two of the variables are alike.
    """

    def __init__(self, keras: ModuleType, strategy: tf.distribute.Strategy, make: Callable[[], Any]) -> None:
        self._strategy = strategy
        with strategy.scope():
            biases = [variable(keras, [1.0, 2.0], "bias"), variable(keras, [-3.0, 0.5], "other_bias")]
            self.variables = [variable(keras, np.ones([3, 2])), *biases]
            self.opt = make()
            self.opt.build(self.variables)

    def step(self, scale: float, *, sparse: bool, unscales: bool = False) -> None:
        def on_replica() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            factor = scale * (tf.cast(replica, tf.float32) + 0.5)
            rows, indices = factor * tf.constant([[1.0, -2.0], [3.0, 0.5]]), tf.stack([replica, 2])
            kernel = tf.IndexedSlices(rows, indices, tf.constant([3, 2])) if sparse else factor * tf.ones([3, 2])
            grads = [kernel, factor * tf.constant([0.25, -1.0]), factor * tf.constant([-0.75, 0.5])]
            _apply(self.opt, self.opt.get_unscaled_gradients(grads) if unscales else grads, self.variables)

        self._strategy.run(on_replica)

    def state(self) -> Any:
        opt = getattr(self.opt, "inner_optimizer", self.opt)
        return values(self._strategy, [*self.variables, *opt.variables])


def _apply(opt: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    if hasattr(opt, "apply"):
        opt.apply(grads, variables)
    else:
        opt.apply_gradients(zip(grads, variables, strict=True))


def _wrapped(keras: ModuleType, name: str, **options: Any) -> Any:
    opt = tfmp.LossScaleOptimizer(optimizer(keras, name, **options), tfmp.FixedLossScaleManager(8), jit_compile=True)
    opt.scale_loss(tf.constant(1.0))
    return opt


@for_every_keras()
@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize(
    ("name", "options", "sparse"),
    [
        *((name, "", False) for name in ("SGD", "Adafactor", "Muon", "Nadam")),
        *(("AdamW", option, False) for option in [*_OPTIONS, "schedule"]),
        ("SGD", "global_clipnorm", True),
        ("Adam", "", True),
    ],
)
@pytest.mark.essential("AdamW", "SGD")
def test_replicas_train_as_the_bare_optimizer(
    keras: ModuleType,
    two_replicas: tf.distribute.MirroredStrategy,
    name: str,
    options: str,
    sparse: bool,
    unscales: bool,
) -> None:
    if name == "Nadam" and not keras.__version__.startswith("3."):
        pytest.skip("without a wrapper too, replicas with Nadam of Keras 2 do not stay the same")
    settings = _options(keras, options)
    plain = _OnReplicas(keras, two_replicas, lambda: optimizer(keras, name, **settings))
    ours = _OnReplicas(keras, two_replicas, lambda: _wrapped(keras, name, **settings))
    plain_step = tf.function(lambda: plain.step(1.0, sparse=sparse))
    step = tf.function(lambda: ours.step(8.0, sparse=sparse, unscales=unscales))
    for _ in range(3):
        plain_step()
        step()
    first, second = ours.state()
    for own, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(own, other)
    for own, other in zip(first, plain.state()[0], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    assert not compiles(lambda: ours.step(8.0, sparse=sparse, unscales=unscales))


@for_every_keras("keras2", "tf_keras")
def test_replicas_count_in_the_one_variable_of_an_optimizer_made_outside_of_the_scope(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    opt = _wrapped(keras, "SGD")
    with two_replicas.scope():
        weight = variable(keras, np.ones([3]))
    _on_each(two_replicas, opt, weight, [tf.ones([3])] * 2)()
    assert int(opt.iterations) == 1


@for_every_keras("keras2", "tf_keras")
def test_sums_of_a_users_own_class_are_its_own(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    class Doubling(keras.optimizers.SGD):
        def aggregate_gradients(self, grads_and_vars: Any) -> Any:
            return [(2 * grad, variable) for grad, variable in super().aggregate_gradients(grads_and_vars)]

    with two_replicas.scope():
        weight = variable(keras, np.ones([3]))
        opt = tfmp.LossScaleOptimizer(Doubling(0.5), tfmp.FixedLossScaleManager(8), jit_compile=True)
        opt.build([weight])
        opt.scale_loss(tf.constant(1.0))
    _on_each(two_replicas, opt, weight, [tf.fill([3], 2.0), tf.fill([3], 4.0)])()
    assert weight.numpy().tolist() == [0.25] * 3


@for_every_keras("keras2", "tf_keras")
def test_dtype_for_horovod_is_refused(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        weight = variable(keras, np.ones([3]))
        settings = {"is_distributed": True, "aggregation_dtype": "float16", "jit_compile": True}
        opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), **settings)
        opt.build([weight])
        opt.scale_loss(tf.constant(1.0))
    with pytest.raises(NotImplementedError, match="aggregation_dtype='float16' is for Horovod"):
        _on_each(two_replicas, opt, weight, [tf.ones([3])] * 2)()


@for_every_keras("keras3")
def test_variable_without_gradient_is_left_alone(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    ours = _OnReplicas(keras, two_replicas, lambda: _wrapped(keras, "SGD"))

    @tf.function
    def step() -> None:
        two_replicas.run(lambda: ours.opt.apply([None, *[tf.constant([8.0, 16.0])] * 2], ours.variables))

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step()
    assert ours.state()[0][:3] == [[[1, 1]] * 3, [0, 0], [-4, -1.5]]


@for_every_keras()
def test_eager_replicas_update_as_those_of_a_function(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    ours = _OnReplicas(keras, two_replicas, lambda: _wrapped(keras, "SGD"))
    ours.step(8.0, sparse=False)
    assert ours.state()[0][1] == [1 - 0.25, 2 + 1.0]


def _on_each(strategy: tf.distribute.Strategy, opt: Any, weight: Any, grads: list[Any]) -> Callable[[], None]:
    """Return a function that steps one weight with a gradient of its own on each replica."""

    @tf.function
    def step() -> None:
        def on_replica() -> None:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            _apply(opt, [tf.nest.map_structure(lambda *each: tf.stack(each)[replica], *grads)], [weight])

        strategy.run(on_replica)

    return step


def _with_weight(
    keras: ModuleType, strategy: tf.distribute.Strategy, *, size: int = 3, **options: Any
) -> tuple[Any, Any]:
    with strategy.scope():
        weight, opt = variable(keras, np.ones([size])), _wrapped(keras, "SGD", **options)
        opt.build([weight])
    return weight, opt


@for_every_keras()
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_overflows_of_large_gradients_are_counted(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, sparse: bool, dtype: str
) -> None:
    weight, opt = _with_weight(keras, two_replicas, size=_LARGE)
    grads = [np.ones([_LARGE], dtype) for _ in range(2)]
    grads[0][[3, 5]] = math.inf
    grads[1][-1] = math.nan
    each = [tf.constant(grad) for grad in grads]
    if sparse:
        each = [tf.IndexedSlices(grad, tf.range(_LARGE), tf.constant([_LARGE])) for grad in each]
    _on_each(two_replicas, opt, weight, each)()
    (report,) = opt.overflow_reports()
    assert report.last.numpy().tolist() == [[2, 1, 0]]


@for_every_keras()
@pytest.mark.parametrize("compiled", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize(("size", "jit_compile"), [(3, True), (3, "auto"), (2**20, True), (2**20, "auto")])
def test_one_tensor_may_be_the_gradient_on_both_replicas(
    keras: ModuleType,
    two_replicas: tf.distribute.MirroredStrategy,
    size: int,
    jit_compile: Any,
    compiled: bool,
) -> None:
    with two_replicas.scope():
        weight, other = variable(keras, np.ones([size])), variable(keras, np.ones([size]), "other")
        opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), jit_compile=jit_compile)
        opt.build([weight, other])
    # As those that a script makes once for a variable that has no gradient yet.
    zeros, fours = tf.zeros([size]), tf.fill([size], 4.0)

    def on_replica() -> None:
        opt.scale_loss(tf.constant(1.0))
        _apply(opt, [fours, zeros], [weight, other])

    def step() -> None:
        two_replicas.run(on_replica)

    (tf.function(step) if compiled else step)()
    # Divided by 8, and summed over both replicas.
    assert [{*np.ravel(each)} for replica in values(two_replicas, [weight, other]) for each in replica] == [
        {0.5},
        {1.0},
    ] * 2


@for_every_keras()
def test_overflows_are_counted_in_what_the_optimizer_would_check(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    weight, opt = _with_weight(keras, two_replicas)
    # The sum, which optimizers of Keras 2 check, is NaN.
    _on_each(two_replicas, opt, weight, [tf.constant([math.inf, 1.0, 1.0]), tf.constant([-math.inf, 1.0, 1.0])])()
    (report,) = opt.overflow_reports()
    is_keras3 = keras.__version__.startswith("3.")
    assert report.last.numpy().tolist() == [[1, 0, 0] if is_keras3 else [0, 1, 0]]
    assert weight.numpy().tolist() == [1, 1, 1]


@for_every_keras()
@pytest.mark.parametrize("sparse", [False, True])
def test_step_whose_sum_overflows_is_skipped(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, sparse: bool
) -> None:
    with two_replicas.scope():
        weight = variable(keras, np.ones([3]))
        opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(1), jit_compile=True)
        opt.build([weight])
        opt.scale_loss(tf.constant(1.0))
    grad = tf.constant([2e38, 1.0, 1.0])
    each = tf.IndexedSlices(grad, tf.range(3), tf.constant([3])) if sparse else grad
    _on_each(two_replicas, opt, weight, [each] * 2)()
    assert (int(opt.skipped_steps), weight.numpy().tolist()) == (1, [1, 1, 1])


@for_every_keras()
def test_float16_gradients_are_summed_in_float32(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    weight, opt = _with_weight(keras, two_replicas)
    # Their sum, 2**16, is infinite in float16.
    _on_each(two_replicas, opt, weight, [tf.constant([2.0**15, 8.0, 16.0], tf.float16)] * 2)()
    assert weight.numpy().tolist() == [1 - 0.5 * 2**13, 0, -1]
    assert int(opt.skipped_steps) == 0


@for_every_keras("keras3")
def test_next_value_of_a_variable_is_not_summed(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        # As the variables of layers are.
        weight, scale = (keras.Variable(value, aggregation="mean") for value in (np.ones([3]), 1.0))
        scale.overwrite_with_gradient = True
        opt = _wrapped(keras, "SGD")
        opt.build([weight, scale])

    @tf.function
    def step() -> None:
        two_replicas.run(lambda: opt.apply([tf.fill([3], 8.0), tf.constant(4.0)], [weight, scale]))

    step()
    assert values(two_replicas, [weight, scale]) == [[[0, 0, 0], 4]] * 2
