"""Which optimizer or scaler has a detector."""

import gc

import pytest
import tensorflow as tf

import tfmp
from tfmp.core.spikes.watch import SpikeWatch

tf1 = tf.compat.v1


def _norm(value: float) -> tf.Tensor:
    return tf.constant(value, tf.float64)


def test_detector_of_another_optimizer_is_refused() -> None:
    detector = tfmp.SpikeDetector()
    first = SpikeWatch(detector)
    with pytest.raises(
        ValueError, match=r"SpikeDetector is used by another optimizer or scaler already.*make a detector for"
    ):
        SpikeWatch(detector)
    assert first.detector is detector


def test_detector_of_an_optimizer_that_is_gone_can_be_used_again() -> None:
    detector = tfmp.SpikeDetector()
    SpikeWatch(detector)
    gc.collect()
    assert SpikeWatch(detector).detector is detector


@pytest.mark.graph
def test_detector_of_another_optimizer_in_the_graph_is_refused() -> None:
    detector = tfmp.SpikeDetector()
    for _ in range(2):
        # A script may make its detector once, and the optimizer again in each graph, as Estimator does.
        with tf.Graph().as_default():
            watch = SpikeWatch(detector)
            watch.look(["adam"], _norm(1.0))
            watch.look(["adam"], _norm(1.0))
            with pytest.raises(ValueError, match="used by another optimizer or scaler already"):
                SpikeWatch(detector).look(["sgd"], _norm(1.0))


def test_optimizers_have_windows_of_their_own() -> None:
    detector, one, two = tfmp.SpikeDetector(), object(), object()
    watch = SpikeWatch(detector)
    stored = [watch.look(optimizers, _norm(1.0)).stored for optimizers in ([one], [two], [one, two], [two])]
    assert stored == [detector.states[index] for index in (0, 1, 2, 1)]


def test_norm_that_is_not_finite_is_never_above_the_bound() -> None:
    watch = SpikeWatch(tfmp.SpikeDetector(max_norm=1))
    found = {value: watch.look(["sgd"], _norm(value)) for value in (2.0, float("inf"), float("nan"))}
    assert [bool(look.is_above) for look in found.values()] == [True, False, False]
