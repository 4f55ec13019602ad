"""Steps whose gradients a program unscales, clips and applies."""

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, RecordingAdapter, scaler_of

import tfmp
from tfmp.core.step.choice import update_of_scaled, update_of_unscaled


def test_program_is_given_the_gradients_the_scale_and_what_it_measured() -> None:
    scaler, adapter = SCALERS["finite"](), RecordingAdapter(is_compiled=True)
    scaler.step(update_of_scaled(adapter, [tf.constant(16.0), None], scaler.facts()))
    # Gradients in true magnitude are divided by 1.
    scaler.step(update_of_unscaled(adapter, [tf.constant(16.0), None], scaler.facts()))
    assert adapter.applied == [([16, None], 8, [2]), ([16, None], 1, [16])]
    assert adapter.steps == [True, True]


@pytest.mark.parametrize(("grad", "applied"), [(1e38, True), (3e38, False)])
def test_gradient_that_overflows_when_it_is_unscaled_is_skipped(grad: float, applied: bool) -> None:
    scaler = scaler_of(tfmp.ExponentialUpdateLossScaleManager(0.5, 100, min_loss_scale=0.5))
    adapter = RecordingAdapter()
    scaler.step(update_of_scaled(adapter, [tf.constant(grad), None], scaler.facts()))
    assert adapter.steps == [applied]
    (report,) = scaler.overflow_reports()
    assert report.last.numpy().tolist() == [[int(not applied), 0, 0], [0, 0, 0]]
