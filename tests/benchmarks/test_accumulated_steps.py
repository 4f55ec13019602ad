"""The comparison of accumulated steps with large batches, on two windows."""

import argparse

import tensorflow as tf

from benchmarks import accumulation


def test_accumulated_steps_are_those_of_the_large_batch_that_was_kept(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    options = argparse.Namespace(windows=2, micro_batches=3, batch_size=2)
    for case in ("no overflow", "overflow drops the micro-batch"):
        assert accumulation.difference(accumulation.by_keras, two_replicas, case, options) < 1e-5
