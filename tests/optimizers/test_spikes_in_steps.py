"""Steps that are skipped as spikes, in every host."""

import logging
from pathlib import Path
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf
from norm_hosts import MODES, SCALE, Training, for_every_host, hosts, training

import tfmp

tf1 = tf.compat.v1


def _outcome(opt: Any) -> tuple[int, int, int, bool, bool]:
    return (
        int(opt.applied_steps),
        int(opt.skipped_steps),
        int(opt.skipped_spikes),
        bool(opt.last_step_applied),
        bool(opt.last_step_finite),
    )


def _steps(made: Training, *values: float) -> None:
    for value in values:
        made.step([tf.constant([value])])


@for_every_host
@pytest.mark.parametrize("mode", MODES)
def test_spike_changes_nothing_and_the_scale_does_not_fall(host: str, mode: str) -> None:
    made = training(host, [[2], [40, 300]], skip_spikes=tfmp.SpikeDetector(window=3))
    step = MODES[mode](lambda first, second: made.step([first, second]))
    ones = tf.ones([40, 300]) / 64
    for _ in range(3):
        step(tf.constant([1.0, 2.0]), ones)
    before = made.weights()
    step(tf.constant([300.0, 0.0]), ones)
    np.testing.assert_array_equal(made.weights()[0], before[0])
    np.testing.assert_array_equal(made.weights()[1], before[1])
    assert _outcome(made.opt) == (3, 1, 1, False, True)
    assert float(made.opt.loss_scale) == SCALE
    np.testing.assert_allclose(float(made.opt.gradient_norm), np.hypot(300, np.sqrt(12000) / 64), rtol=1e-6)
    (report,) = made.opt.spike_reports()
    np.testing.assert_allclose(report.shares, [1, 0], atol=1e-4)
    assert (float(report.norm), int(report.spikes)) == (float(made.opt.gradient_norm), 1)
    assert 3 < float(report.bound) < 10
    step(tf.constant([np.inf, 0.0]), ones)
    assert _outcome(made.opt) == (3, 2, 1, False, False)
    assert float(made.opt.loss_scale) == SCALE / 2
    step(tf.constant([1.0, 2.0]), ones)
    assert _outcome(made.opt) == (4, 2, 1, True, True)


@kerases.for_every_keras()
def test_clipping_by_the_optimizer_does_not_hide_a_spike(keras: Any) -> None:
    detector = tfmp.SpikeDetector(max_norm=10)
    opt = tfmp.LossScaleOptimizer(
        keras.optimizers.SGD(1.0, global_clipnorm=0.5), tfmp.FixedLossScaleManager(SCALE), skip_spikes=detector
    )
    weight = kerases.variable(keras, [0.0])
    for factor in (1.0, 100.0, 8.0):
        kerases.take_step(opt, [weight], [tf.constant([factor])])
    assert weight.numpy().tolist() == [-1.0]


def test_optimizers_of_a_scaler_are_compared_with_their_own_norms() -> None:
    detector = tfmp.SpikeDetector(window=3)
    made = training("scaler", [[1], [1]], skip_spikes=detector)
    scaler, other = made.opt, tf1.train.GradientDescentOptimizer(1.0)

    def iteration(one: float, two: float) -> None:
        scale = scaler.scale(tf.ones([]))
        pairs = [
            [(tf.constant([grad]) * scale, weight)] for grad, weight in zip((one, two), made.variables, strict=True)
        ]
        scaler.step(made.inner, pairs[0])
        scaler.step(other, pairs[1])
        scaler.update()

    for _ in range(3):
        iteration(1.0, 100.0)
    iteration(100.0, 100.0)
    # Only the first optimizer skipped its step. The iteration counts as one that was skipped as a spike.
    assert [weight.tolist() for weight in made.weights()] == [[-3.0], [-400.0]]
    assert _outcome(scaler) == (3, 1, 1, False, True)
    iteration(50.0, 1e6)
    assert _outcome(scaler) == (3, 2, 2, False, True)
    iteration(np.inf, 1e6)
    # An overflow and a spike in one iteration are an overflow.
    assert _outcome(scaler) == (3, 3, 2, False, False)
    assert float(scaler.loss_scale) == SCALE / 2
    iteration(1.0, 100.0)
    assert _outcome(scaler) == (4, 3, 2, True, True)


def test_optimizers_that_step_together_skip_together() -> None:
    made = training("scaler", [[1], [1]], skip_spikes=tfmp.SpikeDetector(max_norm=10))
    other = tf1.train.GradientDescentOptimizer(1.0)
    for one in (1.0, 100.0):
        scale = made.opt.scale(tf.ones([]))
        grads = [tf.constant([one]) * scale, tf.ones([1]) * scale]
        made.opt.step_all(
            [
                (opt, [pair])
                for opt, pair in zip((made.inner, other), zip(grads, made.variables, strict=True), strict=True)
            ]
        )
        made.opt.update()
    assert [weight.tolist() for weight in made.weights()] == [[-1.0], [-1.0]]


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_spike_is_not_replayed_but_an_overflow_is(mode: str) -> None:
    made = training("scaler", [[1]], skip_spikes=tfmp.SpikeDetector(max_norm=10))
    calls = tf.Variable(0)

    def train_step(value: tf.Tensor, overflows_at: tf.Tensor) -> None:
        calls.assign_add(1)
        grad = tf.where(made.opt.manager.get_loss_scale() >= overflows_at, np.float32(np.inf), value)
        made.step([tf.reshape(grad, [1])])

    replay = MODES[mode](
        lambda value, overflows_at: tfmp.replay(lambda: train_step(value, overflows_at), made.opt, max_replays=5)
    )
    replay(tf.constant(100.0), tf.constant(np.inf))
    assert int(calls) == 1
    replay(tf.constant(1.0), tf.constant(SCALE / 2))
    assert int(calls) == 4
    assert made.weights()[0].tolist() == [-1.0]


@pytest.mark.parametrize("host", [host for host in hosts() if host != "v1"])
def test_exported_steps_skip_spikes(host: str, tmp_path: Path) -> None:
    made = training(host, [[1]], skip_spikes=tfmp.SpikeDetector(max_norm=10))
    if hasattr(made.opt, "build"):
        made.opt.build(made.variables)
    module = tf.Module()
    module.opt, module.weight = made.opt, made.variables[0]
    module.step = tf.function(lambda grad: made.step([grad]), input_signature=[tf.TensorSpec([1])])
    module.state = tf.function(
        lambda: (made.opt.gradient_norm, made.opt.skipped_spikes, tf.identity(made.variables[0])), input_signature=[]
    )
    module.step(tf.constant([1.0]))
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    loaded.step(tf.constant([100.0]))
    loaded.step(tf.constant([2.0]))
    norm, spikes, weight = loaded.state()
    assert (float(norm), int(spikes), weight.numpy().tolist()) == (2, 1, [-3])


@for_every_host
def test_detector_of_another_optimizer_is_refused(host: str) -> None:
    detector = tfmp.SpikeDetector()
    first = training(host, [[1]], skip_spikes=detector)
    with pytest.raises(ValueError, match="used by another optimizer or scaler already"):
        training(host, [[1]], skip_spikes=detector)
    assert first.opt.spike_detector is detector


@for_every_host
def test_what_is_no_detector_is_refused(host: str) -> None:
    for given in (True, 10.0, "auto", tfmp.SpikeDetector):
        with pytest.raises(TypeError, match=r"skip_spikes must be a tfmp.SpikeDetector or None.*max_norm"):
            training(host, [[1]], skip_spikes=given)


def test_detector_of_a_scaler_that_is_not_enabled_is_refused() -> None:
    with pytest.raises(ValueError, match="skip_spikes with enabled=False"):
        tfmp.GradScaler(enabled=False, skip_spikes=tfmp.SpikeDetector())


def test_state_dict_of_a_scaler_holds_that_of_its_detector() -> None:
    def make() -> Training:
        return training("scaler", [[1]], skip_spikes=tfmp.SpikeDetector(window=2))

    first, second = make(), make()
    _steps(first, 1.0, 2.0, 100.0)
    state = first.opt.state_dict()
    second.opt.load_state_dict(state)
    assert second.opt.state_dict() == state
    bad = {**state, "loss_scale": -1.0, "spike_detector": {"states": []}}
    with pytest.raises(ValueError, match="loss_scale"):
        second.opt.load_state_dict(bad)
    assert second.opt.state_dict() == state
    # What a scaler without a detector saved can be loaded too.
    second.opt.load_state_dict({name: value for name, value in state.items() if name != "spike_detector"})
    assert second.opt.state_dict() == state


@pytest.mark.graph
def test_detector_of_two_optimizers_of_a_graph_is_refused() -> None:
    with tf.Graph().as_default():
        detector = tfmp.SpikeDetector()
        for name in ("generator", "critic"):
            weight = tf1.Variable([0.0], name=name, use_resource=True)
            opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), SCALE, skip_spikes=detector)
            if name == "critic":
                with pytest.raises(ValueError, match="used by another optimizer or scaler already"):
                    opt.minimize(tf.reduce_sum(weight), var_list=[weight])
            else:
                opt.minimize(tf.reduce_sum(weight), var_list=[weight])


def test_log_max_manager_observes_spikes() -> None:
    manager = tfmp.LogMaxLossScaleManager(init_loss_scale=SCALE)
    detector = tfmp.SpikeDetector(max_norm=10)
    weight = tf.Variable([0.0])
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), manager, skip_spikes=detector)
    for value in (1.0, 64.0):
        opt.minimize(lambda value=value: weight[0] * value, var_list=[weight])
    # The largest magnitudes are 2**0 and 2**6.
    assert manager.state_dict()["log_mean"] == 3
    assert int(opt.skipped_spikes) == 1


def test_no_warning_without_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    made = training("scaler", [[1]], skip_spikes=tfmp.SpikeDetector(max_norm=10))
    with caplog.at_level(logging.WARNING, "tfmp"):
        _steps(made, 1.0, 100.0)
    assert not caplog.records


@pytest.mark.parametrize("together", [False, True], ids=["each", "together"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_optimizers_of_a_scaler_skip_spikes_that_one_replica_has(
    together: bool, mode: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        weights = [tf.Variable([0.0], name=name) for name in ("generator", "critic")]
        optimizers = [tf1.train.GradientDescentOptimizer(1.0) for _ in weights]
        scaler = tfmp.GradScaler(
            manager=tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000), skip_spikes=tfmp.SpikeDetector(max_norm=10)
        )

    def step(fed: tf.Tensor) -> None:
        grads = tf.unstack(tf.gather(fed, tf.distribute.get_replica_context().replica_id_in_sync_group))
        scale = scaler.scale(tf.ones([]))
        pairs = [[(tf.reshape(grad, [1]) * scale, weight)] for grad, weight in zip(grads, weights, strict=True)]
        if together:
            scaler.step_all(list(zip(optimizers, pairs, strict=True)))
        else:
            for optimizer, own in zip(optimizers, pairs, strict=True):
                scaler.step(optimizer, own)
        scaler.update()

    def run(fed: tf.Tensor) -> None:
        two_replicas.run(step, args=(fed,))

    train = run if mode == "eager" else tf.function(run)
    for fed in ([[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [99.0, 2.0]], [[8.0, 1.0], [-7.0, 1.0]]):
        train(tf.constant(fed))
    # The generator skips the second step, on both replicas; the critic skips it too if they step together.
    for replica in range(2):
        values = [two_replicas.experimental_local_results(weight)[replica].numpy().tolist() for weight in weights]
        assert values == [[-3.0], [-6.0 if together else -10.0]]
    assert (int(scaler.applied_steps), int(scaler.skipped_steps), int(scaler.skipped_spikes)) == (2, 1, 1)
    assert float(scaler.loss_scale) == SCALE
