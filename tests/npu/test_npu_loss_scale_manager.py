"""The managers of the NPU bridge follow the rules of tfmp's managers, and have a setting of their own."""

from typing import Any

import pytest
import tensorflow as tf

import tfmp
import tfmp.npu

pytestmark = pytest.mark.graph


def test_exponential_manager_has_the_rule_and_the_settings_of_tfmp() -> None:
    settings: dict[str, Any] = {"init_loss_scale": 8.0, "incr_every_n_steps": 2, "max_loss_scale": 64.0}
    with tf.Graph().as_default():
        manager = tfmp.npu.ExponentialUpdateLossScaleManager(**settings, enable_overflow_check=True)
        assert manager.get_enable_overflow_check()
        assert manager.get_config() == tfmp.ExponentialUpdateLossScaleManager(**settings).get_config()
        assert type(manager).from_config(manager.get_config()).get_config() == manager.get_config()


def test_fixed_manager_is_made_anew_from_its_config() -> None:
    with tf.Graph().as_default():
        manager = tfmp.npu.FixedLossScaleManager(8, False)
        assert type(manager).from_config(manager.get_config()).get_enable_overflow_check() is False


def test_exponential_manager_without_check_is_refused() -> None:
    with pytest.raises(ValueError, match="unchecked, the scale would only grow; leave it out"):
        tfmp.npu.ExponentialUpdateLossScaleManager(8, 2, enable_overflow_check=False)


def test_bad_settings_are_refused_in_the_words_of_the_managers() -> None:
    with pytest.raises(ValueError, match=r"loss_scale must be a float32 number of at least 1, got 0\.5"):
        tfmp.npu.FixedLossScaleManager(0.5)
    with pytest.raises(TypeError, match="enable_overflow_check must be True or False, got 'no'"):
        tfmp.npu.FixedLossScaleManager(8, "no")
    with pytest.raises(ValueError, match="incr_every_n_steps must be a whole number"):
        tfmp.npu.ExponentialUpdateLossScaleManager(8, 0)
