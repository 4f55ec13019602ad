import tensorflow as tf

from tfmp.core.managers.step_counters import StepCounters, next_counters


def test_counts_of_consecutive_skips_end_with_an_applied_step() -> None:
    counters = StepCounters(*tf.constant([5, 3, 2], tf.int64), tf.constant(False))
    assert next_counters(counters, tf.constant(True)) == StepCounters(6, 3, 0, True)
    assert next_counters(counters, tf.constant(False)) == StepCounters(5, 4, 3, False)
