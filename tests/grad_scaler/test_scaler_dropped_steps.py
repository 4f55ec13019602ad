"""Iterations in which the user drops a step after `unscale`, or gives the iteration up, by the rule of torch.amp."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import kerases
import pytest
import tensorflow as tf

import tfmp

_MODES: dict[str, Callable[..., Any]] = {
    "eager": lambda step: step,
    "function": tf.function,
    "XLA": lambda step: tf.function(step, jit_compile=True),
}
_IN_ALL_MODES = pytest.mark.parametrize("mode", _MODES)


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(1.0)


def _counts(scaler: tfmp.GradScaler) -> list[int]:
    return [int(scaler.applied_steps), int(scaler.skipped_steps), int(scaler.consecutive_skipped_steps)]


@_IN_ALL_MODES
@pytest.mark.parametrize("host", ["tf1", *kerases.installed()])
def test_step_dropped_by_its_norm_moves_the_scale_like_torch(host: str, mode: str) -> None:
    optimizer = _sgd() if host == "tf1" else kerases.installed()[host].optimizers.SGD(1.0)
    scaler, weight = tfmp.GradScaler(64, growth_interval=2), tf.Variable([0.0])
    scaler.prepare(optimizer, [weight])

    @_MODES[mode]
    def step(grad: tf.Tensor) -> None:
        grads = scaler.unscale(optimizer, [scaler.scale(grad)])
        # A Python `if` would be the same in eager code, and AutoGraph would make it this.
        tf.cond(tf.linalg.global_norm(grads) < 10.0, lambda: _done(scaler.step(optimizer, [(grads[0], weight)])), _done)
        scaler.update()

    seen = []
    for grad in [1.0, math.inf, 16.0, 1.0, math.nan, 16.0]:
        step(tf.constant([grad]))
        seen.append((float(scaler.loss_scale), scaler.state_dict()["good_steps"], bool(scaler.last_step_finite)))
    # The finite steps that are dropped count for the growth, which happens at the fourth step, and change no status.
    assert seen == [(64, 1, True), (32, 0, False), (32, 1, False), (64, 0, True), (32, 0, False), (32, 1, False)]
    assert weight.numpy().tolist() == [-2.0]
    assert _counts(scaler) == [2, 2, 1]


def _done(op: Any = None) -> tf.Tensor:
    with tf.control_dependencies([] if op is None else [op]):
        return tf.constant(True)


@pytest.mark.parametrize("update_in_function", [False, True], ids=["eager update", "update in a function"])
def test_functions_of_their_own_may_unscale_and_update(update_in_function: bool) -> None:
    scaler, optimizer = tfmp.GradScaler(64), _sgd()
    unscale = tf.function(lambda grad: scaler.unscale(optimizer, [scaler.scale(grad)]))
    update = tf.function(lambda: _done(scaler.update())) if update_in_function else scaler.update
    for grad, scale in [(1.0, 64), (math.inf, 32), (math.nan, 16), (1.0, 16)]:
        unscale(tf.constant(grad))
        update()
        assert float(scaler.loss_scale) == scale
    assert _counts(scaler) == [0, 2, 2]


@pytest.mark.parametrize("together", [False, True], ids=["step", "step_all"])
def test_overflow_of_an_optimizer_that_does_not_step_lowers_the_scale(together: bool) -> None:
    scaler, weights, optimizers = tfmp.GradScaler(64), [tf.Variable(0.0) for _ in range(3)], [_sgd() for _ in range(3)]
    scaler.unscale(optimizers[0], [scaler.scale(math.inf)])
    pairs = [(each, [(scaler.scale(1.0), weight)]) for each, weight in zip(optimizers[1:], weights[1:], strict=True)]
    if together:
        scaler.step_all(pairs)
    else:
        for optimizer, of_one in pairs:
            scaler.step(optimizer, of_one)
    scaler.update()
    assert ([float(weight) for weight in weights], float(scaler.loss_scale)) == ([0, -1, -1], 32)
    # As if the first optimizer had skipped its step.
    assert _counts(scaler) == [0, 1, 1]
    scaler.step(optimizers[0], [(scaler.scale(1.0), weights[0])])
    scaler.update()
    assert (float(weights[0]), float(scaler.loss_scale)) == (-1, 32)


@_IN_ALL_MODES
def test_replicas_lower_the_scale_together_if_one_overflows(
    mode: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    if mode == "XLA":
        pytest.skip("TensorFlow compiles no function with replicas on several devices")
    with two_replicas.scope():
        scaler, optimizer, weight = tfmp.GradScaler(64), _sgd(), tf.Variable(0.0)

    def unscale(factors: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return scaler.unscale(optimizer, [scaler.scale(1.0) * tf.gather(factors, replica)])[0]

    def step(grad: tf.Tensor) -> None:
        scaler.step(optimizer, [(grad, weight)])

    @_MODES[mode]
    def iterate(factors: tf.Tensor, update_outside: bool) -> None:
        grads = two_replicas.run(unscale, args=(factors,))
        if two_replicas.reduce("SUM", grads, axis=None) < 10.0:
            two_replicas.run(step, args=(grads,))
        if update_outside:
            scaler.update()
        else:
            two_replicas.run(scaler.update)

    seen = []
    for factors in ([1.0, 1.0], [1.0, math.inf], [math.nan, 1.0], [16.0, 16.0]):
        iterate(tf.constant(factors), len(seen) % 2 == 0)
        seen.append((float(scaler.loss_scale), float(weight.numpy()), *_counts(scaler)))
    assert seen == [(64, -2, 1, 0, 0), (32, -2, 1, 1, 1), (16, -2, 1, 2, 2), (16, -2, 1, 2, 2)]


def test_workers_that_overflow_and_drop_the_step_lower_the_scale() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        scaler, optimizer = tfmp.GradScaler(64), _sgd()
    for grad, scale in [(math.inf, 32), (1.0, 32)]:
        strategy.run(lambda grad=grad: scaler.unscale(optimizer, [scaler.scale(grad)]))
        scaler.update()
        assert float(scaler.loss_scale) == scale


@pytest.mark.parametrize("drops", [True, False])
def test_disabled_scaler_may_drop_steps(drops: bool) -> None:
    scaler, optimizer, weight = tfmp.GradScaler(enabled=False), _sgd(), tf.Variable(0.0)
    for _ in range(2):
        grads = scaler.unscale(optimizer, [tf.constant(1.0)])
        if not drops:
            scaler.step(optimizer, zip(grads, [weight], strict=True))
        scaler.update()
        scaler.abandon()
    assert (float(weight), float(scaler.loss_scale)) == (0 if drops else -2, 1)


@pytest.mark.parametrize("overflow_drops", ["window", "micro_batch"])
@_IN_ALL_MODES
def test_window_whose_step_is_dropped_is_emptied_and_moves_the_scale(overflow_drops: Any, mode: str) -> None:
    scaler, optimizer, weight = tfmp.GradScaler(64), _sgd(), tf.Variable(0.0)
    accumulator = tfmp.GradientAccumulator([weight], 2, overflow_drops=overflow_drops)

    @_MODES[mode]
    def drop(grads: tf.Tensor) -> list[Any]:
        for grad in tf.unstack(grads):
            accumulator.add([scaler.scale(grad)], scaler.loss_scale)
        mean = scaler.unscale(optimizer, accumulator)
        scaler.update()
        return mean

    means = [float(drop(tf.constant(grads))[0]) for grads in ([1.0, 3.0], [1.0, math.inf], [2.0, 4.0])]
    assert means == [2, 1, 3]
    assert (float(scaler.loss_scale), float(accumulator.tried), float(weight)) == (32, 0, 0)
    # Without the micro-batch that overflowed, the window could have been applied, so that nothing was skipped.
    assert _counts(scaler) == ([0, 1, 1] if overflow_drops == "window" else [0, 0, 0])


def test_replay_repeats_a_step_that_is_dropped_for_an_overflow_and_no_other() -> None:
    scaler, optimizer, weight, grads = tfmp.GradScaler(64), _sgd(), tf.Variable(0.0), []

    def train_step() -> None:
        scaled = scaler.scale(factor)
        grads.extend(scaler.unscale(optimizer, [tf.where(scaled > 16, math.inf, scaled)]))
        if grads[-1] < 2.0:
            scaler.step(optimizer, [(grads[-1], weight)])
        scaler.update()

    for factor, attempts in [(1.0, 3), (1.5, 2), (4.0, 3)]:
        scaler.update(64 if factor == 1 else 16)
        grads.clear()
        tfmp.replay(train_step, scaler, max_replays=5)
        assert len(grads) == attempts
    assert float(weight) == -2.5


def test_new_scale_replaces_what_a_dropped_step_found() -> None:
    scaler, optimizer = tfmp.GradScaler(64), _sgd()
    for grad in (math.inf, 1.0):
        scaler.unscale(optimizer, [scaler.scale(grad)])
        scaler.update(new_scale=256)
    scaler.unscale(optimizer, [scaler.scale(1.0)])
    scaler.update()
    assert (float(scaler.loss_scale), _counts(scaler)) == (256, [0, 1, 1])


def test_manager_gets_the_largest_magnitude_before_clipping_and_of_dropped_steps() -> None:
    scaler, alone = tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager()), tfmp.LogMaxLossScaleManager()
    optimizer, weight = _sgd(), tf.Variable(0.0)
    for magnitude in (64.0, 4.0, 2.0):
        (grad,) = scaler.unscale(optimizer, [scaler.scale(magnitude)])
        if magnitude != 4.0:
            scaler.step(optimizer, [(tf.clip_by_value(grad, -1.0, 1.0), weight)])
        scaler.update()
        alone.update_loss_scale(tf.constant(True), tf.constant(magnitude))
    assert scaler.state_dict() == alone.state_dict()


@pytest.mark.graph
@pytest.mark.parametrize("ends", ["update", "abandon"])
def test_graph_has_an_op_that_drops_a_step(ends: str, session: tf.compat.v1.Session) -> None:
    tf1 = tf.compat.v1
    scaler, weight = tfmp.GradScaler(64, growth_interval=4), tf1.get_variable("w", initializer=0.0, use_resource=True)
    optimizer, grad = _sgd(), tf1.placeholder(tf.float32, [])
    scaled = [scaler.scale(grad)]
    scaler.unscale(optimizer, scaled)
    drop = scaler.update()
    scaler.step(optimizer, zip(scaler.unscale(optimizer, scaled), [weight], strict=True))
    train = scaler.update()
    give_up = scaler.abandon()
    session.run(tf1.global_variables_initializer())
    counts = [scaler.applied_steps, scaler.skipped_steps, scaler.loss_scale, weight]
    session.graph.finalize()
    seen = []
    for op, value in [(train, 1.0), (drop, math.inf), (train, 1.0), (drop, 16.0), (train, math.nan), (drop, 16.0)]:
        session.run(op, {grad: value})
        if ends == "abandon":
            # After an update there is nothing to give up.
            session.run(give_up)
        seen.append(tuple(session.run(counts)))
    assert seen == [(1, 0, 64, -1), (1, 1, 32, -1), (2, 1, 32, -2), (2, 1, 32, -2), (2, 2, 16, -2), (2, 2, 16, -2)]


@pytest.mark.graph
def test_graph_empties_a_window_whose_step_is_dropped(session: tf.compat.v1.Session) -> None:
    tf1 = tf.compat.v1
    weight = tf1.get_variable("w", initializer=0.0, use_resource=True)
    for enabled in (True, False):
        scaler, accumulator = tfmp.GradScaler(64, enabled=enabled), tfmp.GradientAccumulator([weight], 1)
        add = accumulator.add([scaler.scale(tf.constant(1.0))], scaler.loss_scale)
        scaler.unscale(_sgd(), accumulator)
        drop = scaler.update()
        session.run(tf1.global_variables_initializer())
        session.run(add)
        session.run(drop)
        assert session.run(accumulator.tried) == 0


@pytest.mark.graph
def test_unscale_in_a_conditional_of_a_graph_is_refused(session: tf.compat.v1.Session) -> None:
    scaler, optimizer = tfmp.GradScaler(8), _sgd()
    with pytest.raises(NotImplementedError, match=r"unscale in a conditional.*build the unscale outside of it"):
        tf.cond(
            tf.compat.v1.placeholder(tf.bool, []),
            lambda: scaler.unscale(optimizer, [tf.constant(8.0)])[0],
            lambda: tf.constant(0.0),
        )


@_IN_ALL_MODES
def test_loop_that_abandons_by_the_norm_ends_at_the_scale_of_torch(mode: str) -> None:
    scaler, optimizer, weight = tfmp.GradScaler(2.0**20, growth_interval=8), _sgd(), tf.Variable(0.0)

    @_MODES[mode]
    def step(loss: tf.Tensor) -> tf.Tensor:
        scaled = scaler.scale(loss)
        (grad,) = scaler.unscale(optimizer, [tf.where(scaled > 65504, math.inf, scaled)])

        def apply() -> tf.Tensor:
            scaler.step(optimizer, [(grad, weight)])
            return _done(scaler.update())

        tf.cond(grad > 10.0, lambda: _done(scaler.abandon()), apply)
        return scaled

    scale, good = 2.0**20, 0
    for iteration in range(20):
        finite = float(step(tf.constant(16.0 if iteration % 4 == 0 else 1.0))) <= 65504
        good = good + 1 if finite else 0
        scale = scale / 2 if not finite else scale * 2 if good == 8 else scale
        good = 0 if good == 8 else good
        assert (float(scaler.loss_scale), scaler.state_dict()["good_steps"]) == (scale, good)
    assert _counts(scaler)[0] == -float(weight)


@pytest.mark.parametrize("verbs", ["unscale", "step", "unscale step", "unscale other", "step other"])
def test_abandon_lowers_the_scale_after_an_overflow_and_counts_a_skipped_step(verbs: str) -> None:
    scaler, optimizer, other, weight = tfmp.GradScaler(64), _sgd(), _sgd(), tf.Variable(0.0)

    def call(verb: str, optimizer: Any, grad: Any) -> Sequence[Any]:
        if verb == "unscale":
            return scaler.unscale(optimizer, [grad])
        scaler.step(optimizer, [(grad, weight)])
        return [grad]

    grad = scaler.scale(math.nan)
    for verb in verbs.split():
        if verb == "other":
            call("step", other, scaler.scale(1.0))
        else:
            (grad,) = call(verb, optimizer, grad)
    scaler.abandon()
    assert (float(scaler.loss_scale), _counts(scaler)) == (32, [0, 1, 1])
    scaler.abandon()
    assert (float(scaler.loss_scale), _counts(scaler)) == (32, [0, 1, 1])


def test_abandoned_iteration_tells_a_manager_the_largest_magnitude() -> None:
    scalers = [tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager(init_loss_scale=64)) for _ in range(2)]
    for scaler, end in zip(scalers, (scalers[0].abandon, scalers[1].update), strict=True):
        scaler.unscale(_sgd(), [tf.constant(64.0 * 64.0)])
        end()
    abandoned, updated = (scaler.state_dict() for scaler in scalers)
    assert abandoned == updated != tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager(init_loss_scale=64)).state_dict()


@pytest.mark.graph
def test_op_that_gives_up_adjusts_the_scale_before_it_forgets(session: tf.compat.v1.Session) -> None:
    scaler = tfmp.GradScaler(64)
    scaler.unscale(_sgd(), [tf.constant(math.inf)])
    (unscale,) = scaler._iteration.calls.ops()
    give_up = scaler.abandon()
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(unscale)
    session.run(give_up)
    assert session.run([scaler.loss_scale, scaler.skipped_steps]) == [32, 1]


@pytest.mark.parametrize(("values", "scale"), [((70000.0, 70000.0), 32), ((2.0, 2.0), 64)])
def test_mean_of_a_window_that_overflows_its_type_counts_although_the_step_is_dropped(
    values: tuple[float, float], scale: float
) -> None:
    scaler, weight = tfmp.GradScaler(64), tf.Variable(0.0, dtype=tf.float16)
    accumulator = tfmp.GradientAccumulator([weight], 2)
    for value in values:
        accumulator.add([tf.constant(value)])
    scaler.unscale(_sgd(), accumulator)
    scaler.update()
    assert float(scaler.loss_scale) == scale


def test_mean_of_micro_batches_that_a_detector_has_looked_at_is_only_checked_for_finiteness() -> None:
    scaler, weight = tfmp.GradScaler(64, overflow_detector=tfmp.SaturationDetector()), tf.Variable(0.0)
    accumulator = tfmp.GradientAccumulator([weight], 2)
    for value in (2048.0, 2048.0):
        accumulator.add([tf.constant(value)])
    optimizer = _sgd()
    (grad,) = scaler.unscale(optimizer, accumulator)
    scaler.step(optimizer, [(grad, weight)])
    scaler.update()
    assert (float(weight), float(scaler.loss_scale)) == (-2048, 64)
