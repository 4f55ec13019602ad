"""A graph of TensorFlow 1 in which a level changes nothing is told of once."""

import logging
from collections.abc import Iterator

import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

pytestmark = pytest.mark.graph


@pytest.fixture(autouse=True)
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as graph:
        yield graph


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "is in half precision" in each.getMessage()]


def _in_float32() -> list[tf.Tensor]:
    tf.matmul(tf.ones([2, 3]), tf1.get_variable("w", [3, 2], tf.float32))
    return []


@pytest.mark.parametrize("level", ["O2", "O3", "O2-bfloat16"])
def test_level_that_changes_nothing_is_told_once_for_a_graph(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tfmp")
    for name in ("one", "two"):
        with tfmp.precision(level), tf1.variable_scope(name):
            _in_float32()
    (message,) = _told(caplog)
    assert f"tfmp.precision('{level}')" in message
    assert "cast the inputs of the model with the scope's `cast`" in message
    with tf.Graph().as_default(), tfmp.precision(level):
        _in_float32()
    assert len(_told(caplog)) == 2


def test_nothing_is_told_where_the_level_acts_or_has_nothing_to_act_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tfmp")
    with tfmp.precision("O2") as precision:
        tf.matmul(precision.cast(tf.ones([2, 3])), tf.ones([3, 2], tf.float16))
    with tfmp.precision("O2"):
        tf1.get_variable("w", [3, 2])
    with tfmp.precision("O2"):
        tf.constant(3) + 1
    for level in ("O0", "O1"):
        with tfmp.precision(level), tf1.variable_scope(level):
            _in_float32()
    with pytest.raises(ZeroDivisionError), tfmp.precision("O2"), tf1.variable_scope("error"):
        _ = 1 / len(_in_float32())
    assert _told(caplog) == []


def test_nothing_is_told_of_what_cannot_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tfmp")
    with tfmp.precision("O2"):
        tf.function(lambda: tf.cast(tf.ones([2]), tf.float16))()

    @tf.function
    def step() -> tf.Tensor:
        with tfmp.precision("O2"):
            return tf.ones([2]) * 2.0

    step()
    assert _told(caplog) == []
