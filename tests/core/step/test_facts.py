"""What a step must know of its gradients, apart from their optimizer."""

import pytest
import tensorflow as tf
from recording_adapters import SCALERS

from tfmp.core.overflow.gradient_check import Scaling


@pytest.mark.parametrize(
    ("kind", "may_check_scaled"),
    [("finite", True), ("below 1", False), ("saturation", False), ("own detector", True), ("largest magnitude", True)],
)
def test_manager_and_detector_decide_whether_scaled_values_may_be_checked(kind: str, may_check_scaled: bool) -> None:
    facts = SCALERS[kind]().facts()
    assert (float(facts.loss_scale), facts.may_check_scaled) == (8, may_check_scaled)


def test_check_of_a_mean_leaves_out_the_detector_that_looked_at_each_micro_batch() -> None:
    facts, saturated = SCALERS["saturation"]().facts(), [tf.constant(65504 / 8)]
    assert not facts.gradient_check(Scaling.UNSCALED, 1).all_finite(saturated)
    assert facts.gradient_check(Scaling.UNSCALED, 1, of_micro_batches=True).all_finite(saturated)
