"""The wrapper on several replicas in every Keras: they make the same decisions, and train as without a wrapper."""

import math
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, num_programs, optimizer, skip_before, variable
from kit import checks
from kit.keras_hosts import KerasLoop
from replica_training import FitOnReplicas, inputs, ours, values
from scenarios import REPLICATED, STRUCTURE

import tfmp

for_every_keras2 = for_every_keras("keras2", "tf_keras")


def _fit_without_strategy(keras: ModuleType, fed: np.ndarray, wrap: Callable[[Any], Any] = ours) -> list[Any]:
    # The replicas are on CPUs, and a GPU would round differently.
    with tf.device("cpu:0"):
        return FitOnReplicas(keras, tf.distribute.get_strategy(), wrap).train(fed)


@pytest.mark.parametrize("counts", [False, True])
@for_every_keras()
def test_fit_keeps_replicas_one_through_random_overflows_and_gradients_sparse(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, counts: bool
) -> None:
    """Also if skipped steps count, with averages and clipping, in Keras 2."""
    skip_before((3, 9), keras, "fit takes no distributed data")
    if counts and keras.__version__.startswith("3."):
        pytest.skip("under a strategy Keras 3 fails to average the weights, and it does not count skipped steps")
    kinds, fed = set(), inputs()[: 40 if counts else 80]

    class Detector(tfmp.NonFiniteDetector):
        def all_finite(self, grads: Any, loss_scale: tf.Tensor) -> tf.Tensor:
            kinds.update(map(type, grads))
            return super().all_finite(grads, loss_scale)

    def wrap(inner: Any) -> tfmp.LossScaleOptimizer:
        if not counts:
            return ours(inner, overflow_detector=Detector())
        options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3, "global_clipnorm": 0.5}
        return ours(type(inner)(0.125, weight_decay=0.25, **options), iterations_include_skipped_steps=True)

    training = FitOnReplicas(keras, two_replicas, wrap)
    states = training.train(fed)
    assert states == [state * 2 for state in _fit_without_strategy(keras, fed, wrap)]
    skipped = [not np.isfinite(row).all() for row in fed]
    applied = skipped.count(False)
    assert (int(training.opt.applied_steps), int(training.opt.skipped_steps)) == (applied, skipped.count(True))
    assert values(two_replicas, [training.opt.iterations]) == [[len(fed) if counts else applied]] * 2
    if not counts:
        assert [before[0][:2] == after[0][:2] for before, after in pairwise(states)] == skipped[1:]
        assert tf.IndexedSlices in kinds


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@for_every_keras()
def test_replicas_in_eager_code_do_what_the_oracle_says(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    scenario = REPLICATED["norms of sums"]
    host = KerasLoop(STRUCTURE, scenario.rule, scenario.settings, keras=keras, strategy=two_replicas, averages=False)
    states = checks.train(host, scenario.steps())
    assert checks.violations(scenario.course(), states, KerasLoop(STRUCTURE, None, keras=keras, averages=False)) == []


@pytest.mark.parametrize("summed", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}])
@for_every_keras2
def test_gradients_that_the_loop_summed_are_not_summed_again(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, summed: dict[str, bool]
) -> None:
    with two_replicas.scope():
        weight = tf.Variable(1.0)
        opt = ours(keras.optimizers.SGD(0.5))
        opt.build([weight])

    def on_replica(grad: tf.Tensor) -> None:
        [grad] = opt.get_unscaled_gradients([grad * opt.loss_scale])
        total = tf.distribute.get_replica_context().all_reduce("SUM", grad)
        opt.apply_gradients([(total, weight)], **summed)

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
    strategy, fed = tf.distribute.OneDeviceStrategy("cpu:1"), inputs()[:20]
    assert FitOnReplicas(keras, strategy).train(fed) == _fit_without_strategy(keras, fed)


@for_every_keras()
def test_untested_strategy_is_refused_by_name_and_a_step_outside_of_the_replicas(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    central = tf.distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    for strategy in (central, two_replicas):
        with strategy.scope():
            weight, opt = variable(keras, np.ones([3])), _wrapped(keras)
            opt.build([weight])
        if strategy is central:
            step = tf.function(_step_of(strategy, opt, [weight], _fed(np.ones([2, 3]))))
            with pytest.raises(NotImplementedError, match=f"not support {type(central).__name__}: use MirroredStr"):
                step()
            if not keras.__version__.startswith("3.") or tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 9):
                with pytest.raises(NotImplementedError, match=f"does not support {type(central).__name__}"):
                    FitOnReplicas(keras, central).train(inputs()[:1])
        else:
            cure = r"cross-replica context of MirroredStrategy: call .* inside strategy\.run"
            with strategy.scope(), pytest.raises(RuntimeError, match=cure):
                opt.apply_gradients([(tf.ones([3]), weight)])
        assert values(strategy, [weight])[0] == [[1, 1, 1]]


def _wrapped(keras: ModuleType, *, scale: float = 8, **settings: Any) -> Any:
    settings = {"jit_compile": True} | settings
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(scale), **settings)
    opt.scale_loss(tf.constant(1.0))
    return opt


def _step_of(
    strategy: tf.distribute.Strategy, opt: Any, variables: list[Any], grads: Callable[[tf.Tensor], list[Any]]
) -> Callable[[], None]:
    """Return a function that steps with the gradients that `grads` returns for the index of a replica."""

    def on_replica() -> None:
        given = grads(tf.distribute.get_replica_context().replica_id_in_sync_group)
        opt.apply_gradients(zip(given, variables, strict=True))

    return lambda: strategy.run(on_replica)


def _fed(each: Any, dtype: str = "float32", *, sparse: bool = False) -> Callable[[tf.Tensor], list[Any]]:
    """Return a function from the index of a replica to its gradient, a row of these values."""

    def grads(replica: tf.Tensor) -> list[Any]:
        # Each replica needs a tensor of its own.
        grad, size = tf.constant(np.array(each, dtype))[replica], len(each[0])
        return [tf.IndexedSlices(grad, tf.range(size), tf.constant([size])) if sparse else grad]

    return grads


#: So many values that a gradient is not read together with others.
_LARGE = np.ones([2, 2**13])
_LARGE[0, [3, 5]], _LARGE[1, -1] = math.inf, math.nan


@pytest.mark.parametrize(
    ("each", "dtype", "sparse", "scale", "weight", "report"),
    [
        *((_LARGE, dtype, sparse, 8, [1], [2, 1, 0]) for dtype in ("float32", "float16") for sparse in (False, True)),
        # The sum, which optimizers of Keras 2 check, is NaN.
        ([[math.inf, 1, 1], [-math.inf, 1, 1]], "float32", False, 8, [1], {"3": [1, 0, 0], "2": [0, 1, 0]}),
        ([[2e38, 1, 1]] * 2, "float32", False, 1, [1], None),
        ([[2e38, 1, 1]] * 2, "float32", True, 1, [1], "rows"),
        # Their sum, 2**16, is infinite in float16.
        ([[2.0**15, 8, 16]] * 2, "float16", False, 8, [1 - 0.5 * 2**13, 0, -1], [0, 0, 0]),
    ],
    ids=["large", "large sparse", "large float16", "large sparse float16", "inf - inf", "sum", "sparse sum", "float16"],
)
@for_every_keras()
def test_sums_that_overflow_are_skipped_and_what_overflowed_is_counted(
    keras: ModuleType,
    two_replicas: tf.distribute.MirroredStrategy,
    each: Any,
    dtype: str,
    sparse: bool,
    scale: float,
    weight: list[float],
    report: Any,
) -> None:
    if report == "rows" and keras.__version__.startswith("2."):
        pytest.xfail("the optimizer sums rows of one index after the check, on one device too")
    with two_replicas.scope():
        kernel, opt = variable(keras, np.ones(len(each[0]))), _wrapped(keras, scale=scale)
        opt.build([kernel])
    tf.function(_step_of(two_replicas, opt, [kernel], _fed(each, dtype, sparse=sparse)))()
    assert kernel.numpy().tolist() == (weight * len(each[0]) if len(weight) == 1 else weight)
    assert int(opt.skipped_steps) == (len(weight) == 1)
    if isinstance(report, list | dict):
        (found,) = opt.overflow_reports()
        expected = report if isinstance(report, list) else report[keras.__version__[0]]
        assert found.last.numpy().tolist() == [expected]


@for_every_keras()
@pytest.mark.parametrize("compiled", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize(("size", "jit_compile"), [(3, True), (2**20, "auto")])
def test_one_tensor_may_be_the_gradient_on_both_replicas(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, size: int, jit_compile: Any, compiled: bool
) -> None:
    with two_replicas.scope():
        weights = [variable(keras, np.ones([size]), name) for name in ("kernel", "other")]
        opt = _wrapped(keras, jit_compile=jit_compile)
        opt.build(weights)
    # As those that a script makes once for a variable that has no gradient yet.
    zeros, fours = tf.zeros([size]), tf.fill([size], 4.0)
    step = _step_of(two_replicas, opt, weights, lambda replica: [fours, zeros])
    # Keras sums the gradients within its update.
    assert num_programs(step) == 0
    (tf.function(step) if compiled else step)()
    # Divided by 8, and summed over both replicas.
    found = [{*np.ravel(each)} for replica in values(two_replicas, weights) for each in replica]
    assert found == [{0.5}, {1.0}] * 2


@for_every_keras2
def test_replicas_count_in_the_one_variable_of_an_optimizer_made_outside_of_the_scope_and_refuse_a_dtype_for_horovod(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    opt, other = _wrapped(keras), _wrapped(keras, is_distributed=True, aggregation_dtype="float16")
    with two_replicas.scope():
        weight = variable(keras, np.ones([3]))
    tf.function(_step_of(two_replicas, opt, [weight], _fed(np.ones([2, 3]))))()
    assert int(opt.iterations) == 1
    with pytest.raises(NotImplementedError, match="aggregation_dtype='float16' is for Horovod"):
        tf.function(_step_of(two_replicas, other, [weight], _fed(np.ones([2, 3]))))()


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@for_every_keras("keras3")
def test_variable_without_gradient_is_left_alone_and_a_next_value_is_not_summed(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        # As the variables of layers are.
        weight, scale, unused = (keras.Variable(value, aggregation="mean") for value in (np.ones([3]), 1.0, 2.0))
        scale.overwrite_with_gradient = True
        opt = _wrapped(keras)
        opt.build([weight, scale, unused])
    grads = [tf.fill([3], 8.0), tf.constant(4.0), None]
    tf.function(_step_of(two_replicas, opt, [weight, scale, unused], lambda replica: grads))()
    assert values(two_replicas, [weight, scale, unused]) == [[[0, 0, 0], 4, 2]] * 2
