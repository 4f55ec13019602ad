"""Norms of gradients, and steps that are skipped as spikes, on the replicas of a strategy in one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from norm_training import SCALE, STEPS, Host, NormTraining, Outcome, assert_right, for_hosts, hosts, manager, trained

import tfmp

_V1 = [Host("v1"), Host("v1", has_scaler=True)]
_WRAPPED = [host for host in hosts() if not host.has_scaler]


@for_hosts(hosts())
@pytest.mark.parametrize("mode", ["function", "eager"])
def test_norm_is_that_of_the_sum_and_spikes_are_skipped(
    host: Host, mode: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    assert_right(trained(NormTraining(host, two_replicas, mode=mode)))


@pytest.mark.graph
@pytest.mark.home("tf215")
@for_hosts(_V1)
def test_norm_in_a_session_is_fetched_with_the_step(host: Host, two_replicas: tf.distribute.MirroredStrategy) -> None:
    assert_right(trained(NormTraining(host, two_replicas, mode="graph")))


@pytest.mark.graph
@pytest.mark.home("tf215")
def test_norm_in_a_session_must_be_asked_for_if_optimizers_sum(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with tf.Graph().as_default(), two_replicas.scope():
        weight = tf.compat.v1.get_variable("weight", initializer=1.0)
        opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager())
        two_replicas.run(lambda: opt.minimize(weight * 1.0, var_list=[weight]))
        with pytest.raises(AttributeError, match=r"not recorded: call record_gradient_norm\(\) before the first step"):
            _ = opt.gradient_norm


class _Detector(tfmp.NonFiniteDetector):
    """A detector that has to see the gradients of each replica."""


@pytest.mark.home("tf221")
@for_hosts([host for host in hosts() if host == Host("keras3")])
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        # Only here gradients are summed before the check.
        ({}, {"jit_compile": True}),
        ({"clipnorm": 0.5}, {}),
        ({}, {"overflow_detector": _Detector()}),
        ({}, {"overflow_detector": _Detector(), "jit_compile": True}),
    ],
    ids=["compiled", "clipnorm", "detector", "compiled_detector"],
)
def test_norm_of_keras_is_that_of_the_sum_whether_gradients_are_summed_before_the_check_or_not(
    host: Host, options: Any, settings: Any, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    assert_right(trained(NormTraining(host, two_replicas, options=options, **settings)))


@for_hosts(_WRAPPED)
def test_largest_magnitude_is_exchanged_together_with_both_answers(
    host: Host, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    training = NormTraining(host, two_replicas, loss_scale_manager=tfmp.LogMaxLossScaleManager(init_loss_scale=SCALE))
    # The manager chooses a scale of its own at every step.
    assert_right([state._replace(loss_scale=SCALE) for state in trained(training)], is_scale_constant=True)


@for_hosts(hosts())
def test_norm_is_that_before_the_user_clips_on_each_replica(
    host: Host, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    assert_right(trained(NormTraining(host, two_replicas, clips=True)))


@for_hosts(_WRAPPED)
def test_norm_can_be_recorded_without_a_detector(host: Host, two_replicas: tf.distribute.MirroredStrategy) -> None:
    applied = [
        step._replace(outcome=Outcome.APPLIED) if step.outcome is Outcome.SPIKE else step for step in STEPS.values()
    ]
    assert_right(trained(NormTraining(host, two_replicas, skip_spikes=None)), applied)


def _for_hosts_and_sessions(in_sessions: Sequence[Host]) -> pytest.MarkDecorator:
    marks = [pytest.mark.graph, pytest.mark.home("tf215")]
    in_functions = [pytest.param(host, "function", id=str(host)) for host in hosts()]
    return pytest.mark.parametrize(
        ("host", "mode"),
        [*in_functions, *(pytest.param(host, "graph", id=f"{host}_graph", marks=marks) for host in in_sessions)],
    )


@_for_hosts_and_sessions([Host("v1")])
def test_norm_of_a_window_is_that_of_its_mean(
    host: Host, mode: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    training = NormTraining(host, two_replicas, mode=mode, accumulation_steps=2)
    # Sums of these are exact.
    difference = np.float32([[4, -8, 16, 2, 4], [8, 4, -2, 4, 8]])
    assert_right([training.train(step.fed - difference, step.fed + difference) for step in STEPS.values()])


@_for_hosts_and_sessions(_V1)
def test_window_of_norms_is_restored_exactly(
    host: Host, mode: str, two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    def training() -> NormTraining:
        return NormTraining(host, two_replicas, mode=mode, skip_spikes=tfmp.SpikeDetector(8))

    rng = np.random.default_rng(1)
    usual = [rng.normal(size=[2, 5]) for _ in range(12)]
    saved = training()
    for fed in usual[:10]:
        saved.train(fed)
    path = saved.save(tmp_path / "training")
    # The first step after the checkpoint is a spike on the second replica alone.
    later = [usual[10] * [[1], [100]], *usual[10:], usual[11] * [[1], [100]]]
    expected = [saved.train(fed) for fed in later]
    resumed = training()
    resumed.restore(path)
    states = [resumed.train(fed) for fed in later]
    # Only the optimizers of Keras save the numbers of steps.
    assert [state._replace(counts=[]) for state in states] == [state._replace(counts=[]) for state in expected]
    assert [state.counts for state in expected] == [[10, 1, 1], [11, 1, 1], [12, 1, 1], [12, 2, 2]]
    if mode == "function":
        assert resumed.ours.spike_detector.state_dict() == saved.ours.spike_detector.state_dict()


@pytest.mark.home("tf221")
@pytest.mark.parametrize("together", [False, True], ids=["each", "together"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_optimizers_of_a_scaler_skip_spikes_that_one_replica_has(
    together: bool, mode: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        weights = [tf.Variable([0.0], name=name) for name in ("generator", "critic")]
        optimizers = [tf.compat.v1.train.GradientDescentOptimizer(1.0) for _ in weights]
        scaler = tfmp.GradScaler(manager=manager(), skip_spikes=tfmp.SpikeDetector(max_norm=10))

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
