"""The wrapper around Keras optimizers on several replicas, which must make the same decisions."""

import functools
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, skip_before
from replica_training import OVERFLOWS, ReplicaTraining, inputs, ours, values

import tfmp

pytestmark = pytest.mark.essential


@functools.cache
def _on_one_device(keras: ModuleType) -> list[Any]:
    """Return the expected states of two replicas after every step, if many of them overflow."""
    return [state * 2 for state in _without_strategy(keras, inputs("random"))]


def _without_strategy(keras: ModuleType, fed: np.ndarray, wrap: Callable[[Any], Any] = ours) -> list[Any]:
    # The replicas are on CPUs, and a GPU would round differently.
    with tf.device("cpu:0"):
        return ReplicaTraining(keras, tf.distribute.get_strategy(), wrap).by_fit(fed)


@for_every_keras()
@pytest.mark.parametrize(("overflows", "compiled"), [(OVERFLOWS, True), (["last"], False)], ids=["compiled", "eager"])
@pytest.mark.essential("compiled")
def test_overflow_on_any_replica_skips_all(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, overflows: Iterable[str], compiled: bool
) -> None:
    training, fed = ReplicaTraining(keras, two_replicas), np.concatenate([inputs(each) for each in overflows])
    states = list(training.by_loop(fed, compiled=compiled))
    assert all(first == second for first, second in states)
    kernels_and_biases = [first[:2] for first, _ in states]
    skipped = [not np.isfinite(row).all() for row in fed]
    assert [before == after for before, after in pairwise(kernels_and_biases)] == skipped[1:]
    opt = training.opt
    assert (int(opt.applied_steps), int(opt.skipped_steps)) == (skipped.count(False), skipped.count(True))
    assert values(two_replicas, [opt.iterations]) == [[skipped.count(False)]] * 2


@for_every_keras()
def test_fit_skips_on_all_replicas(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile(ours(keras.optimizers.Adam(0.125)), "mse")
    skipped = 0
    for overflow, replicas in OVERFLOWS.items():
        before = values(two_replicas, model.weights)
        # Each replica gets two rows of a batch of four.
        x = np.ones([4, 1], np.float32)
        x[[2 * replica for replica in replicas]] = math.inf
        model.fit(x, np.zeros([4, 1]), batch_size=4, shuffle=False, verbose=0)
        first, second = values(two_replicas, model.weights)
        assert first == second
        assert np.isfinite(first[0]).all()
        assert ([first, second] == before) is (overflow != "none")
        skipped += overflow != "none"
        assert int(model.optimizer.skipped_steps) == skipped


@for_every_keras()
@pytest.mark.parametrize("way", ["scale_loss", "get_scaled_loss", "fit"])
@pytest.mark.essential(None)
def test_replicas_stay_one_through_200_random_overflows(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, way: str
) -> None:
    training, fed = ReplicaTraining(keras, two_replicas), inputs("random")
    states = training.by_fit(fed) if way == "fit" else list(training.by_loop(fed, unscale=way == "get_scaled_loss"))
    assert states == _on_one_device(keras)
    applied = int(np.isfinite(fed).all(axis=1).sum())
    assert (int(training.opt.applied_steps), int(training.opt.skipped_steps)) == (applied, 200 - applied)


@for_every_keras()
def test_sparse_gradients_of_all_replicas_are_applied_or_none(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    skip_before((3, 8), keras, "fit does not divide the loss by the number of replicas")
    kinds = []

    class Detector(tfmp.NonFiniteDetector):
        def all_finite(self, grads: Any, loss_scale: tf.Tensor) -> tf.Tensor:
            kinds.extend(map(type, grads))
            return super().all_finite(grads, loss_scale)

    with two_replicas.scope():
        embedding = keras.layers.Embedding(4, 1, embeddings_initializer="ones")
        model = keras.Sequential([keras.Input([], dtype="int32"), embedding])
        opt = ours(keras.optimizers.SGD(0.5), overflow_detector=Detector())
        model.compile(opt, loss=lambda target, output: target * output)
    # The step that is applied comes last.
    for replicas in sorted(OVERFLOWS.values(), reverse=True):
        target = np.ones([4, 1], np.float32)
        target[[2 * replica for replica in replicas]] = math.inf
        # Both replicas look up row 1.
        model.fit(np.int32([0, 1, 1, 2]), target, batch_size=4, shuffle=False, verbose=0)
        rows = [1, 1, 1, 1] if replicas else [0.875, 0.75, 0.875, 1]
        assert values(two_replicas, model.weights) == [[[[row] for row in rows]]] * 2
    assert set(kinds) == {tf.IndexedSlices}


@for_every_keras("keras2", "tf_keras")
def test_skipped_steps_can_count_in_iterations_on_all_replicas(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    fed = inputs("random")[:40]
    training = ReplicaTraining(keras, two_replicas, lambda inner: ours(inner, iterations_include_skipped_steps=True))
    for step, state in enumerate(training.by_loop(fed), 1):
        assert values(two_replicas, [training.opt.iterations]) == [[step], [step]]
        assert state[0] == state[1]
    assert int(training.opt.applied_steps) == np.isfinite(fed).all(axis=1).sum()


@for_every_keras("keras2", "tf_keras")
def test_moving_averages_and_clipping_equal_those_on_one_device(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    def wrap(inner: Any) -> tfmp.LossScaleOptimizer:
        options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3, "global_clipnorm": 0.5}
        return ours(type(inner)(0.125, weight_decay=0.25, **options))

    fed = inputs("random")[:40]
    on_one_device = _without_strategy(keras, fed, wrap)
    assert list(ReplicaTraining(keras, two_replicas, wrap).by_loop(fed)) == [state * 2 for state in on_one_device]


@for_every_keras("keras2", "tf_keras")
def test_gradients_that_the_loop_summed_are_not_summed_again(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        weight = tf.Variable(1.0)
        opt = ours(keras.optimizers.SGD(0.5))
        opt.build([weight])

    def on_replica(grad: tf.Tensor) -> None:
        [grad] = opt.get_unscaled_gradients([grad * opt.loss_scale])
        total = tf.distribute.get_replica_context().all_reduce("SUM", grad)
        opt.apply_gradients([(total, weight)], skip_gradients_aggregation=True)

    for grads in ((0.25, 0.5), (math.inf, 0.5), (0.5, math.nan)):
        each = two_replicas.experimental_distribute_values_from_function(
            lambda context, grads=grads: tf.constant(grads[context.replica_id_in_sync_group])
        )
        tf.function(two_replicas.run)(on_replica, args=(each,))
        assert values(two_replicas, [weight]) == [[0.625], [0.625]]
    assert int(opt.skipped_steps) == 2


@for_every_keras()
def test_strategy_of_one_device_changes_nothing(keras: ModuleType) -> None:
    skip_before((3, 9), keras, "fit takes no distributed data")
    strategy, fed = tf.distribute.OneDeviceStrategy("cpu:1"), inputs("random")[:40]
    without = _without_strategy(keras, fed)
    assert ReplicaTraining(keras, strategy).by_fit(fed) == without
    assert list(ReplicaTraining(keras, strategy).by_loop(fed)) == without


@for_every_keras()
@pytest.mark.parametrize("way", ["loop", "fit"])
def test_untested_strategy_is_refused_by_name(keras: ModuleType, way: str) -> None:
    skip_before((3, 9), keras, "fit takes no distributed data")
    strategy = tf.distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    training = ReplicaTraining(keras, strategy)
    before = values(strategy, training.model.weights)
    train = training.by_fit if way == "fit" else training.by_loop
    with pytest.raises(NotImplementedError, match=f"does not support {type(strategy).__name__}: use MirroredStrategy"):
        list(train(inputs("none")))
    assert values(strategy, training.model.weights) == before


@for_every_keras()
def test_step_outside_the_replicas_is_refused(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    training = ReplicaTraining(keras, two_replicas)
    weights = training.model.trainable_variables
    with (
        two_replicas.scope(),
        pytest.raises(RuntimeError, match=r"cross-replica context of MirroredStrategy: call .* inside strategy\.run"),
    ):
        training.opt.apply_gradients([(tf.ones_like(weight), weight) for weight in weights])
