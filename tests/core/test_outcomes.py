import tensorflow as tf

from tfmp.core.outcomes import StepOutcomes, next_outcomes


def test_counts_of_consecutive_skips_end_with_an_applied_step() -> None:
    outcomes = StepOutcomes(*tf.constant([5, 3, 2], tf.int64), tf.constant(False))
    assert next_outcomes(outcomes, tf.constant(True)) == StepOutcomes(6, 3, 0, True)
    assert next_outcomes(outcomes, tf.constant(False)) == StepOutcomes(5, 4, 3, False)
