from typing import Any

import keras
import pytest
import tensorflow as tf

import tfmp
from tfmp.optimizers.v1 import LossScaleOptimizerV1

pytestmark = pytest.mark.graph


def test_front_end_is_picked_by_the_wrapped_optimizer() -> None:
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
    assert type(opt) is LossScaleOptimizerV1
    assert isinstance(opt, tfmp.LossScaleOptimizer)
    assert isinstance(opt, tf.compat.v1.train.Optimizer)


@pytest.mark.parametrize("bad", [None, 0.1, "adam", object()])
def test_object_that_is_not_an_optimizer_is_refused(bad: Any) -> None:
    with pytest.raises(
        TypeError, match=r"opt must be a tf\.compat\.v1\.train\.Optimizer or .*, got .* of type builtins"
    ):
        tfmp.LossScaleOptimizer(bad, tfmp.FixedLossScaleManager(8))


@pytest.mark.skipif(keras.__version__.startswith("3."), reason="Keras 3 has no legacy optimizers")
def test_legacy_optimizer_of_keras_has_a_front_end_of_its_own() -> None:
    opt = tfmp.LossScaleOptimizer(keras.optimizers.legacy.SGD(), tfmp.FixedLossScaleManager(8))
    assert type(opt) is tfmp.optimizers.LossScaleOptimizerLegacyKeras215


def test_config_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config must be what get_config of a LossScaleOptimizer .*got name"):
        tfmp.LossScaleOptimizer.from_config({"name": "sgd"})
