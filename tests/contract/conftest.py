"""What several tests of the contract use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import tensorflow as tf


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.MirroredStrategy:
    import tensorflow as tf  # the lane without TensorFlow imports this file

    # The default, collective ops, fails when one process makes a second strategy.
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
