"""What a step must know of its gradients, apart from their optimizer."""

import pytest
import tensorflow as tf
from recording_adapters import SCALERS

from tfmp.core.monitors.gradient_ranges import GradientRanges
from tfmp.core.overflow.gradient_check import Scaling


@pytest.mark.parametrize(
    ("kind", "may_check_scaled", "needs_only_finiteness"),
    [
        ("finite", True, True),
        ("below 1", False, True),
        ("saturation", False, False),
        ("own detector", True, False),
        ("largest magnitude", True, False),
    ],
)
def test_manager_detector_and_monitors_decide_what_must_be_known(
    kind: str, may_check_scaled: bool, needs_only_finiteness: bool
) -> None:
    scaler = SCALERS[kind]()
    facts = scaler.facts()
    assert (float(facts.loss_scale), facts.may_check_scaled, facts.needs_only_finiteness) == (
        8,
        may_check_scaled,
        needs_only_finiteness,
    )
    scaler.gradient_ranges = GradientRanges()
    assert (scaler.facts().may_check_scaled, scaler.facts().needs_only_finiteness) == (may_check_scaled, False)


def test_check_of_a_mean_leaves_out_the_detector_that_looked_at_each_micro_batch() -> None:
    facts, saturated = SCALERS["saturation"]().facts(), [tf.constant(65504 / 8)]
    assert not facts.gradient_check(Scaling.UNSCALED, 1).all_finite(saturated)
    assert facts.gradient_check(Scaling.UNSCALED, 1, of_micro_batches=True).all_finite(saturated)
