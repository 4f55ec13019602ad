"""A value that is saved and restored like a variable."""

from pathlib import Path

import pytest
import tensorflow as tf

from tfmp.core.storage.in_checkpoint import InCheckpoint

pytestmark = pytest.mark.essential


def test_value_takes_the_place_of_a_variable_in_a_checkpoint_and_back(tmp_path: Path) -> None:
    restored: list[tf.Tensor] = []
    value, variable = InCheckpoint(lambda: tf.constant(3.0), restored.append), tf.Variable(0.0)
    path = tf.train.Checkpoint(part=value).save(str(tmp_path / "value"))
    tf.train.Checkpoint(part=variable).restore(path).assert_consumed()
    assert (float(variable), restored) == (3, [])
    variable.assign(5)
    path = tf.train.Checkpoint(part=variable).save(str(tmp_path / "variable"))
    tf.train.Checkpoint(part=value).restore(path).assert_consumed()
    assert [float(each) for each in restored] == [5]


def test_variable_that_the_functions_use_is_not_saved_itself(tmp_path: Path) -> None:
    variable = tf.Variable(3.0)
    value = InCheckpoint(variable.read_value, lambda saved: variable.assign(saved).op)
    path = tf.train.Checkpoint(part=value).write(str(tmp_path / "value"))
    held = [name for name, _ in tf.train.list_variables(path) if name != "_CHECKPOINTABLE_OBJECT_GRAPH"]
    assert held == ["part/.ATTRIBUTES/VARIABLE_VALUE"]
