"""Who wants to know the norm of a step, how it is measured, and what is then kept of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from recording_adapters import OfTwo, halving, scaler_of, take_step

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.step.facts import WantedNorm
from tfmp.core.step.measured import Measured
from tfmp.core.step.scaler import LossScaler
from tfmp.core.step.step_norms import StepNorms


def _norm(grads: Sequence[Any], loss_scale: float | None = None, **settings: Any) -> float:
    scale = None if loss_scale is None else tf.constant(loss_scale)
    return float(Measured(grads, scale, **{"is_summed": True} | settings).norm(["kernel", "bias"], OfTwo()))


@pytest.mark.parametrize(
    ("values", "dtype", "arguments", "norm"),
    [
        # Divided by the loss scale.
        (([24.0], [32.0]), tf.float32, {"loss_scale": 8.0}, 5),
        (([3.0], [4.0]), tf.float32, {}, 5),
        # Summed over the replicas, unless they are already; half precision in float32.
        (([3.0, 4.0], None), tf.float32, {}, 5),
        (([3.0, 4.0], None), tf.float32, {"is_summed": False}, 10),
        (([40000.0], None), tf.float16, {"is_summed": False}, 80000),
    ],
)
def test_norm_is_that_of_the_unscaled_sum_over_the_replicas(
    values: Sequence[Any], dtype: tf.DType, arguments: dict[str, Any], norm: float
) -> None:
    assert _norm([None if each is None else tf.constant(each, dtype) for each in values], **arguments) == norm


@pytest.mark.parametrize("jit_compile", [False, True])
def test_rows_with_the_same_index_are_added_up(jit_compile: bool) -> None:
    def norm() -> tf.Tensor:
        rows = tf.IndexedSlices(tf.constant([[1.0], [4.0], [2.0]]), tf.constant([5, 0, 5]), tf.constant([6, 1]))
        return Measured([rows], None, is_summed=True).norm(["embedding"], SingleProcess())

    assert float(tf.function(norm, jit_compile=jit_compile)()) == 5


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_norm_of_gradients_that_overflowed_is_not_finite(value: float) -> None:
    assert not np.isfinite(_norm([tf.constant([1.0, value]), tf.constant([1.0])], 8.0))


def _scaler(detector: tfmp.SpikeDetector | None = None) -> LossScaler:
    return scaler_of(halving(), spike_detector=detector)


def _take_step(scaler: LossScaler, value: float) -> None:
    take_step(scaler, [tf.constant([value])], ["kernel"], lambda grads: tf.no_op())


def test_nobody_wants_the_norm_unless_it_is_recorded_or_compared() -> None:
    norms = StepNorms(halving())
    assert norms.wanted is WantedNorm.NO
    assert tf.function(lambda: tf.constant(norms.wanted.name))().numpy() == b"NO"
    norms.record()
    assert norms.wanted is WantedNorm.YES
    assert StepNorms(halving(), tfmp.SpikeDetector()).wanted is WantedNorm.YES


@pytest.mark.graph
def test_norm_may_be_fetched_from_a_graph_but_not_from_a_function_in_it() -> None:
    norms = StepNorms(halving())
    with tf.Graph().as_default():
        assert norms.wanted is WantedNorm.WITHOUT_EXCHANGE
        found: list[WantedNorm] = []
        tf.function(lambda: found.append(norms.wanted))()
        assert found == [WantedNorm.NO]


def test_norm_of_an_overflow_is_infinite_although_the_gradients_that_are_left_are_finite() -> None:
    scaler = scaler_of(halving(), tfmp.SaturationDetector(limit=8.0))
    scaler.norms.record()
    _take_step(scaler, 0.5)
    assert float(scaler.norms.read()) == 0.5
    _take_step(scaler, 5.0)
    assert float(scaler.norms.read()) == np.inf


def test_spike_is_described_by_its_gradients() -> None:
    scaler = _scaler(tfmp.SpikeDetector(max_norm=4))
    grads = [tf.constant([3.0]), None, tf.constant([4.0])]
    take_step(scaler, grads, ["kernel", "bias", "scale"], lambda grads: pytest.fail("a spike was applied"))
    (report,) = scaler.norms.spike_reports()
    assert (report.names, float(report.norm), float(report.bound)) == (["kernel", "bias", "scale"], 5, 4)
    np.testing.assert_allclose(report.shares, [0.36, 0, 0.64], rtol=1e-6)


def test_shares_of_a_clipped_spike_are_those_before_clipping_together() -> None:
    scaler = _scaler(tfmp.SpikeDetector(max_norm=4))
    grads = scaler.unscale([tf.constant([24.0]), tf.constant([32.0])])
    clipped, _ = tfmp.clip_by_global_norm(grads, 1.0)
    take_step(scaler, clipped, ["kernel", "bias"], lambda grads: pytest.fail("a spike was applied"))
    (report,) = scaler.norms.spike_reports()
    assert float(report.norm) == 5
    np.testing.assert_allclose(report.shares, [0.36, 0.64], rtol=1e-6)


def test_overflow_is_no_spike() -> None:
    detector = tfmp.SpikeDetector(max_norm=4)
    scaler = _scaler(detector)
    _take_step(scaler, np.inf)
    assert int(detector.skipped_spikes) == 0
    assert scaler.norms.spike_reports() == []
