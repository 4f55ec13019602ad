"""What several tests of the contract use."""

import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.MirroredStrategy:
    # The default, collective ops, fails when one process makes a second strategy.
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
