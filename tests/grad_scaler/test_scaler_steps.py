"""Steps of a `GradScaler` with each host's optimizers: alone, together, on replicas, of an accumulator's window."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import kerases
import pytest
import tensorflow as tf
from scaler_loops import HOSTS, IN_BOTH_WAYS, WAYS, Training, counts, sgd

import tfmp
from tfmp.types import Gradients

_ALL_HOSTS = [*HOSTS, *(f"{name} legacy" for name in kerases.installed() if name != "keras3")]


@pytest.mark.parametrize(
    ("way", "together", "host"),
    [
        *((way, True, host) for way in ("eager", "replicas, function") for host in _ALL_HOSTS),
        *((way, False, host) for way in ("xla", "replicas, function") for host in _ALL_HOSTS),
        *(("replicas, eager", together, "tf1") for together in (True, False)),
    ],
)
def test_optimizers_decide_each_for_itself_or_together(
    way: str, together: bool, host: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    on_replicas = "replicas" in way
    with two_replicas.scope() if on_replicas else contextlib.nullcontext():
        scaler, optimizers = tfmp.GradScaler(1024), [sgd(0.5, host, momentum=0.5) for _ in range(2)]
        weights = [tf.Variable(1.0, name=name) for name in ("first", "second")]

    def step(factor: tf.Tensor) -> None:
        # Only the second replica has the factor. Clipping turns an infinite value into a finite one.
        if on_replicas:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            factor = tf.where(tf.equal(replica, 1), factor, 1.0)
        (grad,) = scaler.unscale(optimizers[0], [scaler.scale(factor)])
        grads = [tf.clip_by_value(grad, -8.0, 8.0), scaler.scale(tf.constant(1.0))]
        steps = [
            (optimizer, [(grad, weight)]) for optimizer, grad, weight in zip(optimizers, grads, weights, strict=True)
        ]
        if together:
            scaler.step_all(steps)
        else:
            for optimizer, pairs in steps:
                scaler.step(optimizer, pairs)
        scaler.update()

    iterate = (lambda factor: two_replicas.run(step, (factor,))) if on_replicas else step
    iterate = WAYS[way.removeprefix("replicas, ")](iterate)
    for factor in (1.0, math.inf, 1.0):
        iterate(tf.constant(factor))
    # Two and three steps with momentum; replicas sum their gradients.
    moved = [(0.5 + 0.75) * (1 + on_replicas), (0.5 + 0.75 + (0 if together else 0.875)) * (1 + on_replicas)]
    assert [float(weight.numpy()) for weight in weights] == [1 - each for each in moved]
    assert (float(scaler.loss_scale), counts(scaler)) == (512, [2, 1, 0])


@IN_BOTH_WAYS
def test_replicas_unscale_groups_in_runs_of_their_own_and_drop_the_step_together(
    way: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        training = Training(tfmp.GradScaler(64))

    def unscale(factors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        grads = training.scaled(tf.gather(factors, replica))
        return training.unscale(grads[1:])[0], grads[0]

    def step(clipped: tf.Tensor, rest: tf.Tensor) -> None:
        training.step([rest, clipped])

    @WAYS[way]
    def iterate(factors: tf.Tensor, update_outside: bool) -> None:
        clipped, rest = two_replicas.run(unscale, args=(factors,))
        if two_replicas.reduce("SUM", clipped, axis=None) < 10.0:
            two_replicas.run(step, args=(clipped, rest))
        if update_outside:
            training.scaler.update()
        else:
            two_replicas.run(training.scaler.update)

    seen = []
    for factors in ([1.0, 1.0], [1.0, math.inf], [math.nan, 1.0], [16.0, 16.0], [0.0, 2.0]):
        iterate(tf.constant(factors), len(seen) % 2 == 0)
        seen.append((training.weights[0].numpy(), training.weights[1].numpy(), float(training.scaler.loss_scale)))
    assert seen == [(0, 1, 64), (0, 1, 32), (0, 1, 16), (0, 1, 16), (-1, 0, 16)]
    assert counts(training.scaler) == [2, 2, 0]
    # Each replica's calls are recorded as its own.
    grads = two_replicas.run(lambda: training.scaled(1.0))
    two_replicas.run(training.step, args=(grads,))
    with pytest.raises(RuntimeError, match="step was called already"):
        two_replicas.run(training.step, args=(grads,))


def test_unscale_leaves_room_for_the_sum_over_replicas(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        scaler, optimizer = tfmp.GradScaler(1), sgd()
    for grad, num_skipped in ((1e38, 0), (3e38, 1)):
        two_replicas.run(lambda grad=grad: scaler.unscale(optimizer, [scaler.scale(grad)]))
        scaler.update()
        assert int(scaler.skipped_steps) == num_skipped


@pytest.mark.parametrize("host", _ALL_HOSTS)
@pytest.mark.parametrize("way", ["function", "replicas"])
def test_variable_without_a_gradient_is_not_changed_and_is_trained_in_a_later_trace(
    host: str, way: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    on_replicas = way == "replicas"
    with two_replicas.scope() if on_replicas else contextlib.nullcontext():
        scaler, optimizer = tfmp.GradScaler(8), sgd(0.5, host, momentum=0.5)
        variables = [tf.Variable(1.0), tf.Variable(1.0)]

    def iterate(trained: int) -> None:
        grads = [scaler.scale(tf.constant(0.5)) if index == trained else None for index in range(2)]
        scaler.step(optimizer, zip(grads, variables, strict=True))
        scaler.update()

    run = (lambda trained: two_replicas.run(iterate, (trained,))) if on_replicas else tf.function(iterate)
    for trained in (0, 1):
        run(trained)
    # A gradient of 0 would move the first variable again, by its momentum. Replicas sum their gradients.
    assert [float(variable.numpy()) for variable in variables] == [0.5 if on_replicas else 0.75] * 2


@pytest.mark.parametrize("way", [*WAYS, "replicas, function"])
@pytest.mark.parametrize("overflow_drops", ["window", "micro_batch"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("steps", [True, False], ids=["stepped", "dropped"])
def test_mean_of_a_window_is_clipped_and_applied_or_dropped(
    steps: bool, overflow_drops: Any, enabled: bool, way: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    num_replicas = 2 if "replicas" in way else 1
    strategy = two_replicas if num_replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        scaler, weight, optimizer = tfmp.GradScaler(64, enabled=enabled), tf.Variable(0.0), sgd()
        accumulator = tfmp.GradientAccumulator([weight], 2, overflow_drops=overflow_drops)

    def take_step() -> tf.Tensor:
        (mean,) = scaler.unscale(optimizer, accumulator)
        if steps:
            scaler.step(optimizer, [(tf.clip_by_value(mean, -2.0, 2.0), weight)])
        scaler.update()
        return mean

    @WAYS[way.removeprefix("replicas, ")]
    def window(grads: tf.Tensor) -> Any:
        for grad in tf.unstack(grads, 2):
            strategy.run(lambda grad: accumulator.add([scaler.scale(grad)], scaler.loss_scale), args=(grad,))
        return strategy.experimental_local_results(strategy.run(take_step))

    means = [float(window(tf.constant(grads))[0]) for grads in ([1.0, 2.0], [6.0, math.inf], [2.0, 4.0])]
    assert means == [1.5, 6, 3]
    # Replicas sum what they clipped.
    applied = num_replicas * (1.5 + 2.0 * (overflow_drops == "micro_batch") + 2.0)
    assert (float(weight.numpy()), float(scaler.loss_scale)) == (-applied * steps, 32 if enabled else 1)
    assert float(accumulator.tried.numpy()) == 0
    # Without the micro-batch that overflowed the window can be applied, so that nothing is skipped.
    skipped = overflow_drops == "window"
    assert counts(scaler)[:2] == [(3 - skipped) * steps * enabled, skipped * enabled]


@pytest.mark.parametrize(
    ("dtype", "detector", "value", "weight", "scale"),
    [
        # The sum of finite micro-batches overflows the type of the mean.
        (tf.float16, None, 70000.0, 0, 32),
        (tf.float16, None, 2.0, -2, 64),
        # The detector has looked at the micro-batches: of the mean only finiteness is asked.
        (tf.float32, tfmp.SaturationDetector(), 2048.0, -2048, 64),
    ],
)
@pytest.mark.parametrize("steps", [True, False])
def test_mean_of_a_window_is_only_checked_for_finiteness(
    steps: bool, dtype: Any, detector: Any, value: float, weight: float, scale: float
) -> None:
    scaler, variable = tfmp.GradScaler(64, overflow_detector=detector), tf.Variable(0.0, dtype=dtype)
    accumulator, optimizer = tfmp.GradientAccumulator([variable], 2), sgd()
    for _ in range(2):
        accumulator.add([tf.constant(value)])
    grads = scaler.unscale(optimizer, accumulator)
    if steps:
        scaler.step(optimizer, zip(grads, [variable], strict=True))
    scaler.update()
    assert (float(variable), float(scaler.loss_scale)) == (weight * steps, scale)


@pytest.mark.parametrize("others", ["scaled", "unscaled", "window"])
def test_window_steps_together_with_other_gradients(others: str) -> None:
    settings = {"overflow_detector": tfmp.SaturationDetector(1024.0)}
    scaler, optimizers = tfmp.GradScaler(8, **settings), [sgd(), sgd()]
    weights, seen = [tf.Variable(0.0, name=name) for name in ("plain", "also", "of_window")], []

    def mean(index: int, variables: list[Any], *micro_batches: list[tf.Tensor]) -> list[Any]:
        accumulator = tfmp.GradientAccumulator(variables, len(micro_batches), overflow_drops="micro_batch", **settings)
        for grads in micro_batches:
            accumulator.add(grads, scaler.loss_scale)
        return scaler.unscale(optimizers[index], accumulator)

    # The plain gradient of the last step is saturated.
    for plain, of_window in ((1.0, 2.0), (1.0, math.inf), (math.nan, 2.0), (600.0, 2.0)):
        of_second = mean(1, weights[2:], [scaler.scale(of_window)], [scaler.scale(4.0)])
        of_first = [scaler.scale(plain), scaler.scale(1.0)]
        if others != "scaled":
            of_first = mean(0, weights[:2], of_first) if others == "window" else scaler.unscale(optimizers[0], of_first)
        steps = [
            (optimizers[0], zip(of_first, weights[:2], strict=True)),
            (optimizers[1], [(of_second[0], weights[2])]),
        ]
        scaler.step_all(steps)
        scaler.update()
        seen.append((float(scaler.loss_scale), bool(scaler.last_step_applied), bool(scaler.last_step_finite)))
    assert seen == [(8, True, True), (4, True, False), (2, False, False), (1, False, False)]
    assert [float(weight) for weight in weights] == [-2, -2, -7]
    reports = [(report.names, report.steps.numpy().tolist()) for report in scaler.overflow_reports()]
    assert reports == [(["plain:0", "also:0", "of_window:0"], [2, 0, 1])]


def test_workers_that_overflow_and_drop_the_step_lower_the_scale() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        scaler, optimizer = tfmp.GradScaler(64), sgd()
    for grad, scale in [(math.inf, 32), (1.0, 32)]:
        strategy.run(lambda grad=grad: scaler.unscale(optimizer, [scaler.scale(grad)]))
        scaler.update()
        assert float(scaler.loss_scale) == scale


def test_settings_of_the_rule_can_be_read() -> None:
    scaler = tfmp.GradScaler(8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    read = [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
    assert (float(scaler.get_scale()), *read, scaler.is_enabled()) == (8.0, 4.0, 0.25, 7, True)
    of_manager = tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager(incr_every_n_steps=5))
    assert of_manager.get_growth_interval() == 5


@IN_BOTH_WAYS
def test_scale_in_a_tensor_is_checked_when_it_is_set(way: str) -> None:
    training = Training(tfmp.GradScaler(8))

    @WAYS[way]
    def iterate(new_scale: tf.Tensor) -> None:
        training.step(training.scaled())
        training.scaler.update(new_scale)

    for bad in (math.nan, math.inf, 0.5, -8.0):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"scale|finite"):
            iterate(tf.constant(bad))
        # The step is not counted, although its gradients were applied before.
        assert (float(training.scaler.loss_scale), int(training.scaler.attempted_steps)) == (8, 0)
        training.scaler.abandon()


#: Calls of an iteration, and the largest magnitude that the manager gets.
_MAGNITUDES: dict[str, tuple[Callable[[Training], Any], float]] = {
    "of all optimizers": (
        lambda t: [t.scaler.step(sgd(), [(t.scaler.scale(each), tf.Variable(0.0))]) for each in (4.0, 64.0, 1.0)],
        64,
    ),
    "before clipping": (lambda t: t.step([tf.minimum(each, 0.5) for each in t.unscale(t.scaled(16.0))]), 16),
    "of a dropped step": (lambda t: t.unscale(t.scaled(32.0)), 32),
    "of optimizers together": (
        lambda t: t.scaler.step_all(
            [
                (t.optimizer, [(t.unscale(t.scaled(2.0))[1], t.weights[1])]),
                (sgd(), [(t.scaler.scale(128.0), t.weights[0])]),
            ]
        ),
        128,
    ),
    "of an iteration that is given up": (lambda t: (t.unscale(t.scaled(256.0)), t.scaler.abandon()), 256),
}


def test_manager_gets_the_largest_magnitude_of_each_iteration() -> None:
    training, alone = Training(tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager())), tfmp.LogMaxLossScaleManager()
    for name, (calls, magnitude) in _MAGNITUDES.items():
        calls(training)
        if "given up" not in name:
            training.scaler.update()
        alone.update_loss_scale(tf.constant(True), tf.constant(magnitude, tf.float32))
        assert training.scaler.state_dict() == alone.state_dict(), name


class _Recorder(tfmp.NonFiniteDetector):
    """Keeps how many gradients it read at each check."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        self.read.append(sum(grad is not None for grad in grads))
        return super().all_finite(grads, loss_scale)


@IN_BOTH_WAYS
@pytest.mark.parametrize(
    ("change", "read", "values"),
    [
        pytest.param(None, [2], [-1, 0, -2], id="not unscaled"),
        pytest.param(lambda first, rows: [first, rows], [2], [-1, 0, -2], id="unchanged"),
        pytest.param(lambda first, rows: [first * 2, rows], [2, 1], [-2, 0, -2], id="one changed"),
        pytest.param(
            lambda first, rows: tf.clip_by_global_norm([first, rows], 1e6)[0], [2, 2], [-1, 0, -2], id="both changed"
        ),
        pytest.param(lambda first, rows: [first * math.inf, rows], [2, 1], [0, 0, 0], id="overflow of the user"),
    ],
)
def test_gradients_are_read_once_if_they_are_not_changed(
    change: Callable[..., Any] | None, read: list[int], values: list[float], way: str
) -> None:
    detector, optimizer = _Recorder(), sgd()
    scaler, weights = tfmp.GradScaler(8, overflow_detector=detector), [*map(tf.Variable, (0.0, 0.0, [0.0, 0.0]))]

    @WAYS[way]
    def iterate(first: tf.Tensor) -> None:
        grads = [first, None, tf.IndexedSlices(tf.constant([16.0]), tf.constant([1]), tf.constant([2]))]
        if change is not None:
            unscaled = scaler.unscale(optimizer, grads)
            grads[0], grads[2] = change(unscaled[0], unscaled[2])
        scaler.step(optimizer, zip(grads, weights, strict=True))
        scaler.update()

    iterate(tf.constant(8.0))
    assert detector.read == read
    assert [*map(float, weights[:2]), float(weights[2][1])] == values


class _Fused:
    """Unscales and skips by itself, in one assignment."""

    def apply_scaled_gradients(self, grads_and_vars: Any, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation:
        return tf.group(
            *(
                variable.assign_sub(tf.where(finite, grad / loss_scale, tf.zeros_like(grad)))
                for grad, variable in grads_and_vars
            )
        )


@IN_BOTH_WAYS
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_optimizer_that_skips_itself_is_given_scale_and_decision(unscales: bool, enabled: bool, way: str) -> None:
    scaler, fused, ordinary = tfmp.GradScaler(8, enabled=enabled), _Fused(), sgd()
    assert isinstance(fused, tfmp.grad_scaler.ScaledGradientsOptimizer)
    weights = [tf.Variable(0.0) for _ in range(3)]

    @WAYS[way]
    def iterate(grads: tf.Tensor) -> None:
        own, other = tf.unstack(scaler.scale(grads))
        if unscales:
            (own,) = scaler.unscale(fused, [own])
        scaler.step_all([(fused, [(None, weights[2]), (own, weights[0])]), (ordinary, [(other, weights[1])])])
        scaler.update()

    for grads in ([1.0, 2.0], [1.0, math.inf], [math.nan, 1.0], [4.0, 4.0])[: 4 if enabled else 1]:
        iterate(tf.constant(grads))
    assert [float(weight) for weight in weights] == ([-5, -6, 0] if enabled else [-1, -2, 0])
    assert float(scaler.loss_scale) == (2 if enabled else 1)


@pytest.mark.parametrize(("unscales", "expected"), [(False, (24, tf.float16, 8)), (True, (3, tf.float32, 1))])
def test_optimizer_that_skips_itself_gets_what_it_was_passed_beside_unscaled_gradients(
    unscales: bool, expected: tuple[float, tf.DType, float]
) -> None:
    class Noting:
        def apply_scaled_gradients(self, grads_and_vars: Any, loss_scale: tf.Tensor, finite: tf.Tensor) -> None:
            ((grad, _),) = grads_and_vars
            assert (float(grad), grad.dtype, float(loss_scale)) == expected
            given.append(bool(finite))

    scaler, noting, ordinary, given = tfmp.GradScaler(8), Noting(), sgd(), list[bool]()
    for other in (16.0, math.inf):
        grads, rest = [tf.constant(24.0, tf.float16)], scaler.unscale(ordinary, [tf.constant(other)])
        scaler.step_all(
            [
                (noting, zip(scaler.unscale(noting, grads) if unscales else grads, [tf.Variable(0.0)], strict=True)),
                (ordinary, zip(rest, [tf.Variable(0.0)], strict=True)),
            ]
        )
        scaler.update(8.0)
    assert given == [True, False]


def test_norm_without_scaling_has_what_was_unscaled_before_the_last_update() -> None:
    scaler, optimizers = tfmp.GradScaler(enabled=False), [sgd(), sgd()]
    scaler.record_gradient_norm()
    grads = [scaler.unscale(optimizers[0], [tf.constant(3.0)])]
    scaler.update()
    grads.append(scaler.unscale(optimizers[1], [tf.constant(4.0)]))
    pairs = [[(own[0], tf.Variable(0.0))] for own in grads]
    scaler.step_all(zip(optimizers, pairs, strict=True))
    assert float(scaler.gradient_norm) == 5


def test_optimizer_that_skips_itself_divides_by_1_beside_the_window_of_a_disabled_scaler() -> None:
    scaler, fused, ordinary = tfmp.GradScaler(8, enabled=False), _Fused(), sgd()
    weights = [tf.Variable(0.0), tf.Variable(0.0)]
    accumulator = tfmp.GradientAccumulator(weights[1:], 1)
    accumulator.add([tf.constant(3.0)])
    mean = scaler.unscale(ordinary, accumulator)
    scaler.step_all([(fused, [(tf.constant(2.0), weights[0])]), (ordinary, zip(mean, weights[1:], strict=True))])
    assert [float(weight) for weight in weights] == [-2, -3]


def _noting(base: Any) -> Any:
    """Return an optimizer of a subclass that notes what it is called with."""

    class Noting(base):
        def apply_gradients(self, grads_and_vars: Any, **kwargs: Any) -> Any:
            self.called = [variable for _, variable in grads_and_vars], kwargs
            return None

    return Noting(1.0) if base is not object else Noting()


@pytest.mark.parametrize("host", [*_ALL_HOSTS, "own"])
def test_optimizer_is_called_with_the_users_arguments_and_the_pairs_that_it_may_get(host: str) -> None:
    noting, scaler = _noting(object if host == "own" else type(sgd(1.0, host))), tfmp.GradScaler(8)
    without, trained = tf.Variable(0.0), tf.Variable(0.0)
    for kwargs in ({"name": "step"}, {}):
        scaler.step(noting, [(None, without), (tf.constant(8.0), trained)], **kwargs)
        scaler.update()
        variables, given = noting.called
        assert given == kwargs
        assert [each is trained for each in variables] == [True]


@pytest.mark.parametrize("host", _ALL_HOSTS)
@pytest.mark.parametrize("prepares", [True, False])
def test_optimizer_that_first_steps_in_a_later_trace_must_be_prepared(host: str, prepares: bool) -> None:
    scaler, optimizers = tfmp.GradScaler(8), [sgd(0.5, host, momentum=0.5) for _ in range(2)]
    first, *others = weights = [tf.Variable(1.0, name=name) for name in ("first", "second", "third")]
    traces = []

    @tf.function
    def iterate(index: int) -> None:
        traces.append(index)
        scaler.scale(tf.constant(0.0))
        scaler.step(optimizers[index], [(tf.constant(8.0), weight) for weight in (others if index else [first])])
        scaler.update()

    if prepares:
        scaler.prepare(optimizers[1], others)
    iterate(0)
    if not prepares and host != "keras3":
        missing = "(SGD|MomentumOptimizer) has no variables yet for second:0, third:0, and a tf.function makes none"
        message = f"{missing}|Creating variables on a non-first"
        with pytest.raises(ValueError, match=message):
            iterate(1)
        return
    # The optimizers of Keras 3 are built in any trace.
    for _ in range(2):
        iterate(1)
    assert [float(weight) for weight in weights] == [0.5, -0.25, -0.25]
    assert traces[-1] == 1
    if host == "keras3":
        assert traces == [0, 1]
        assert [each.path.split("/")[-1] for each in optimizers[0].variables[2:]] == ["first_0_momentum"]
