import pytest
import tensorflow as tf

import tfmp


def test_scale_stays_whatever_the_steps_show() -> None:
    manager = tfmp.FixedLossScaleManager(1000)
    for finite in (True, False, False):
        manager.update_loss_scale(tf.constant(finite))
    assert float(manager.get_loss_scale()) == 1000
    assert manager.get_loss_scale().dtype == tf.float32


def test_lowest_scale_is_the_scale_and_no_skips_lower_it() -> None:
    manager = tfmp.FixedLossScaleManager(8)
    assert (manager.lowest_loss_scale, manager.skips_per_backoff) == (8, None)


def test_there_is_no_state_to_set_save_or_restore() -> None:
    manager = tfmp.FixedLossScaleManager(8)
    assert manager.state_dict() == {}
    with pytest.raises(NotImplementedError, match="the scale of a FixedLossScaleManager cannot be set"):
        manager.set_loss_scale(4.0)


def test_configuration_holds_the_scale() -> None:
    config = tfmp.FixedLossScaleManager(512).get_config()
    assert config == {"loss_scale": 512}
    assert float(tfmp.FixedLossScaleManager.from_config(config).get_loss_scale()) == 512


@pytest.mark.graph
def test_graph_has_one_constant_and_no_variable_of_the_scale(session: tf.compat.v1.Session) -> None:
    manager = tfmp.FixedLossScaleManager(8)
    assert manager.get_loss_scale() is manager.get_loss_scale()
    assert session.run([manager.get_loss_scale(), manager.update_loss_scale(tf.constant(False))]) == [8, None]
    assert tf.compat.v1.global_variables() == []


@pytest.mark.graph
def test_manager_serves_a_graph_that_it_was_not_made_in() -> None:
    manager = tfmp.FixedLossScaleManager(8)
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            assert session.run(manager.get_loss_scale()) == 8
