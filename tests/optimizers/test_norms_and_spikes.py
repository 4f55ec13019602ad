"""Norms and spikes beside what every host does alike: who asks for them and when, and a scaler's several optimizers."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, for_every_kind, kinds, optimizer, take_step, variable, wrap

import tfmp

tf1 = tf.compat.v1

_SGD = tf1.train.GradientDescentOptimizer
_KINDS = {"v1": (None, tf1.train.GradientDescentOptimizer)} | {
    name: (keras, optimizers.SGD) for name, (keras, optimizers) in kinds().items()
}


class _Two:
    """A scaler, and two optimizers that train a weight each, 0 at the start."""

    def __init__(self, **settings: Any) -> None:
        manager = tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        self.scaler = tfmp.GradScaler(manager=manager, **settings)
        self.weights = [tf.Variable([0.0], name=name) for name in ("generator", "critic")]
        self.optimizers = [_SGD(1.0) for _ in self.weights]

    def step(self, *grads: Any, together: bool = False) -> None:
        """Take an iteration; with one gradient only the first optimizer steps."""
        scale = self.scaler.scale(tf.ones([]))
        pairs = [[(tf.reshape(grad, [1]) * scale, weight)] for grad, weight in zip(grads, self.weights, strict=False)]
        if together:
            self.scaler.step_all(list(zip(self.optimizers, pairs, strict=True)))
        else:
            for opt, own in zip(self.optimizers, pairs, strict=False):
                self.scaler.step(opt, own)
        self.scaler.update()

    def outcome(self) -> list[Any]:
        """Return the weights, and what became of the steps."""
        scaler = self.scaler
        counts = [int(each) for each in (scaler.applied_steps, scaler.skipped_steps, scaler.skipped_spikes)]
        weights = [weight.numpy().item() for weight in self.weights]
        return [weights, counts, bool(scaler.last_step_finite), float(scaler.loss_scale)]


@pytest.mark.parametrize(
    "call",
    [
        lambda function: tf.cond(tf.constant(value=True), function, lambda: None),
        lambda function: tf.function(function)(),
        lambda function: tf.cond(tf.constant(value=True), tf.function(function), lambda: None),
    ],
    ids=["in a branch", "in a function", "in a function in a branch"],
)
@pytest.mark.parametrize("outer", ["eager", "function"])
@pytest.mark.parametrize("kind", _KINDS)
def test_norm_is_measured_before_the_script_clips_in_inner_code(kind: str, outer: str, call: Any) -> None:
    keras, make = _KINDS[kind]
    opt, weight = tfmp.LossScaleOptimizer(make(1.0), tfmp.FixedLossScaleManager(SCALE)), variable(keras, [0.0, 0.0])
    opt.record_gradient_norm()

    def step() -> None:
        [(grad, _)] = opt.compute_gradients(lambda: tf.reduce_sum(weight * [3.0, 4.0]), [weight])

        def clip_and_apply() -> None:
            opt.apply_gradients([(tfmp.clip_by_global_norm([grad], 0.5)[0][0], weight)])

        call(clip_and_apply)

    (step if outer == "eager" else tf.function(step))()
    assert float(opt.gradient_norm) == 5
    np.testing.assert_allclose(weight.numpy(), [-0.3, -0.4], rtol=1e-6)


@pytest.mark.parametrize("clip", [tf.clip_by_global_norm, tfmp.clip_by_global_norm])
def test_norm_of_a_scaler_is_measured_before_the_script_clips_by_any_function(clip: Any) -> None:
    two = _Two()
    two.scaler.record_gradient_norm()

    def step() -> None:
        grads, _ = clip(
            two.scaler.unscale(two.optimizers[0], [tf.constant([size]) * SCALE for size in (3.0, 4.0)]), 0.5
        )
        two.scaler.step(two.optimizers[0], zip(grads, two.weights, strict=True))
        two.scaler.update()

    two.scaler.scale(tf.ones([]))
    tf.function(step)()
    assert float(two.scaler.gradient_norm) == 5
    np.testing.assert_allclose(two.outcome()[0], [-0.3, -0.4], rtol=1e-6)


def test_norm_of_a_scaler_is_that_of_its_last_step() -> None:
    two = _Two()
    two.scaler.record_gradient_norm()
    two.step(3.0, 4.0)
    assert float(two.scaler.gradient_norm) == 4
    two.step(3.0, 4.0, together=True)
    assert float(two.scaler.gradient_norm) == 5


def test_scaler_that_is_not_enabled_has_the_norm_and_no_detector() -> None:
    scaler, weight, opt = tfmp.GradScaler(enabled=False), tf.Variable([1.0, 1.0]), _SGD(1.0)
    scaler.record_gradient_norm()
    scaler.step(opt, [(tf.constant([3.0, 4.0]), weight)])
    scaler.update()
    assert float(scaler.gradient_norm) == 5
    scaler.step(opt, [(grad * 0.5, weight) for grad in scaler.unscale(opt, [tf.constant([6.0, 8.0])])])
    assert float(scaler.gradient_norm) == 10
    with pytest.raises(AttributeError, match=r"call record_gradient_norm\(\) before"):
        _ = _Two().scaler.gradient_norm
    with pytest.raises(ValueError, match="skip_spikes with enabled=False"):
        tfmp.GradScaler(enabled=False, skip_spikes=tfmp.SpikeDetector())
    with pytest.raises(TypeError, match=r"skip_spikes must be a tfmp.SpikeDetector or None.*max_norm"):
        tfmp.GradScaler(skip_spikes=10.0)


@pytest.mark.graph
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("where", ["window", "replicas"])
def test_norm_in_a_conditional_of_a_graph_or_of_sums_of_replicas_must_be_asked_for(
    where: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    strategy = two_replicas if where == "replicas" else tf.distribute.get_strategy()
    with strategy.scope():
        weight = tf1.get_variable("weight", initializer=1.0, use_resource=True)
        settings = {"accumulation_steps": 2} if where == "window" else {}
        opt = tfmp.LossScaleOptimizer(_SGD(1.0), tfmp.FixedLossScaleManager(SCALE), **settings)
        strategy.run(lambda: opt.minimize(weight * 1.0, var_list=[weight]))
        with pytest.raises(AttributeError, match=r"not recorded: call record_gradient_norm\(\) before the first step"):
            _ = opt.gradient_norm
        opt.record_gradient_norm()
        # For a gradient that depends on a variable, TensorFlow would search the graph for the variable, and fail.
        strategy.run(lambda: opt.minimize(weight * weight, var_list=[weight]))
        assert opt.gradient_norm.shape == []


@for_every_kind
def test_report_of_a_spike_names_what_was_large_and_the_bound(keras: ModuleType, optimizers: ModuleType) -> None:
    inner, detector = optimizers.SGD(1.0), tfmp.SpikeDetector(window=3)
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE), skip_spikes=detector)
    weights = [tf.Variable([0.0, 0.0]), tf.Variable([0.0])]
    for first in (1.0, 1.0, 1.0, 300.0):
        opt.minimize(lambda first=first: weights[0][0] * first + weights[1][0], weights)
    assert [weight.numpy().tolist() for weight in weights] == [[-3, 0], [-3]]
    (report,) = opt.spike_reports()
    np.testing.assert_allclose(report.shares, [1, 0], atol=1e-4)
    assert (float(report.norm), int(report.spikes)) == (float(opt.gradient_norm), 1)
    assert 3 < float(report.bound) < 10


@for_every_keras()
def test_clipping_by_the_optimizer_does_not_hide_a_spike(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras, learning_rate=1.0, global_clipnorm=0.5), skip_spikes=tfmp.SpikeDetector(max_norm=10))
    weight = variable(keras, [0.0])
    for factor in (1.0, 100.0, 8.0):
        take_step(opt, [weight], [tf.constant([factor])])
    assert weight.numpy().tolist() == [-1.0]


def test_optimizers_of_a_scaler_are_compared_with_their_own_norms(caplog: pytest.LogCaptureFixture) -> None:
    two = _Two(skip_spikes=tfmp.SpikeDetector(window=3))
    for grads, expected in [
        *[((1.0, 100.0), None)] * 3,
        # Only the first optimizer skips its step. The iteration counts as one that was skipped as a spike.
        ((100.0, 100.0), [[-3, -400], [3, 1, 1], True, SCALE]),
        ((50.0, 1e6), [[-3, -400], [3, 2, 2], True, SCALE]),
        # An overflow and a spike in one iteration are an overflow.
        ((np.inf, 1e6), [[-3, -400], [3, 3, 2], False, SCALE / 2]),
        ((1.0, 100.0), [[-4, -500], [4, 3, 2], True, SCALE / 2]),
    ]:
        two.step(*grads)
        assert expected is None or two.outcome() == expected
    assert not caplog.records


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_spike_is_not_replayed_but_an_overflow_is(compiled: bool) -> None:
    two, calls = _Two(skip_spikes=tfmp.SpikeDetector(max_norm=10)), tf.Variable(0)

    def train_step(value: tf.Tensor, overflows_at: tf.Tensor) -> None:
        calls.assign_add(1)
        two.step(tf.where(two.scaler.manager.get_loss_scale() >= overflows_at, np.float32(np.inf), value))

    def replayed(value: tf.Tensor, overflows_at: tf.Tensor) -> None:
        tfmp.replay(lambda: train_step(value, overflows_at), two.scaler, max_replays=5)

    run = tf.function(replayed) if compiled else replayed
    for value, overflows_at, expected in [(100.0, np.inf, 1), (1.0, SCALE / 2, 4)]:
        run(tf.constant(value), tf.constant(overflows_at))
        assert int(calls) == expected
    assert two.outcome()[0] == [-1, 0]


def test_state_dict_of_a_scaler_holds_that_of_its_detector() -> None:
    first, second = (_Two(skip_spikes=tfmp.SpikeDetector(window=2)) for _ in range(2))
    for value in (1.0, 2.0, 100.0):
        first.step(value)
    state = first.scaler.state_dict()
    second.scaler.load_state_dict(state)
    assert second.scaler.state_dict() == state
    with pytest.raises(ValueError, match="loss_scale"):
        second.scaler.load_state_dict({**state, "loss_scale": -1.0, "spike_detector": {"states": []}})
    assert second.scaler.state_dict() == state
    # What a scaler without a detector saved can be loaded too.
    second.scaler.load_state_dict({name: value for name, value in state.items() if name != "spike_detector"})
    assert second.scaler.state_dict() == state


def test_log_max_manager_observes_spikes() -> None:
    manager, weight = tfmp.LogMaxLossScaleManager(init_loss_scale=SCALE), tf.Variable([0.0])
    opt = tfmp.LossScaleOptimizer(_SGD(1.0), manager, skip_spikes=tfmp.SpikeDetector(max_norm=10))
    for value in (1.0, 64.0):
        opt.minimize(lambda value=value: weight[0] * value, var_list=[weight])
    # The largest magnitudes are 2**0 and 2**6.
    assert (manager.state_dict()["log_mean"], int(opt.skipped_spikes)) == (3, 1)


@pytest.mark.parametrize("together", [False, True], ids=["each", "together"])
def test_optimizers_of_a_scaler_skip_spikes_that_one_replica_has(
    together: bool, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        two = _Two(skip_spikes=tfmp.SpikeDetector(max_norm=10))

    def step(fed: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        two.step(*tf.unstack(tf.gather(fed, replica)), together=together)

    run: Callable[[tf.Tensor], None] = tf.function(lambda fed: two_replicas.run(step, args=(fed,)))
    for fed in ([[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [99.0, 2.0]], [[8.0, 1.0], [-7.0, 1.0]]):
        run(tf.constant(fed))
    # The generator skips the second step, on both replicas; the critic skips it too if they step together.
    for replica in range(2):
        values = [two_replicas.experimental_local_results(each)[replica].numpy().item() for each in two.weights]
        assert values == [-3.0, -6.0 if together else -10.0]
    assert two.outcome()[1:] == [[2, 1, 1], True, SCALE]
