import pytest
import tensorflow as tf

from tfmp.core.tracing import without_autograph

pytestmark = pytest.mark.essential


def _larger(value: tf.Tensor) -> tf.Tensor:
    if value > 0:
        value = value + 1
    return value


def _caller(value: tf.Tensor) -> tf.Tensor:
    return _larger(value)


def test_autograph_converts_neither_the_function_nor_its_callees() -> None:
    assert float(tf.function(_caller)(tf.constant(1.0))) == 2
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(without_autograph(_caller))(tf.constant(1.0))
