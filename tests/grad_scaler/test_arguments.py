from typing import Any

import pytest
import tensorflow as tf

from tfmp.grad_scaler.arguments import validated_pairs


def test_variable_with_float8_scales_is_refused() -> None:
    class Scale:
        overwrite_with_gradient = True
        assign = None

    with pytest.raises(
        NotImplementedError, match=r'"gradient" of a variable is its next value.*tfmp.LossScaleOptimizer'
    ):
        validated_pairs(tf.compat.v1.train.GradientDescentOptimizer(1.0), [(tf.constant(1.0), Scale())])


@pytest.mark.parametrize("pairs", [tf.constant([[1.0, 2.0]]), [tf.constant(1.0)], [[tf.constant(1.0)]]])
def test_anything_but_pairs_is_refused(pairs: Any) -> None:
    with pytest.raises(
        TypeError, match=r"must be pairs of a gradient and its variable, .*: pass zip\(grads, variables\)"
    ):
        validated_pairs(tf.compat.v1.train.GradientDescentOptimizer(1.0), pairs)
