import pytest
import tensorflow as tf

from tfmp.monitoring.step_counting import lines_that_assign


@pytest.mark.graph
@pytest.mark.parametrize("by_hand", [False, True])
def test_mirrored_step_is_known_outside_its_scope(two_replicas: tf.distribute.MirroredStrategy, by_hand: bool) -> None:
    with tf.Graph().as_default():
        with two_replicas.scope():
            global_step = tf.compat.v1.train.get_or_create_global_step()
            if by_hand:
                global_step.assign_add(1)
        # The initializer of the global step is not counted as a line of the script.
        assert len(lines_that_assign(global_step)) == by_hand
