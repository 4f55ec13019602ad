"""The comparison of accumulated steps with large batches, on two windows."""

import argparse

import tensorflow as tf

from benchmarks import accumulation


def test_accumulated_steps_are_those_of_the_large_batch_that_was_kept(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    options = argparse.Namespace(windows=2, micro_batches=3, batch_size=2)
    for training, case in (
        (accumulation.by_keras, "overflow drops the micro-batch"),
        (accumulation.by_tf1, "overflow drops the window"),
    ):
        assert accumulation.difference(training, two_replicas, case, options) < 1e-6
