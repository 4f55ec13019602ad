"""The successors of tf.contrib's names, against TensorFlow."""

import importlib
from functools import reduce

import pytest
import tensorflow as tf

from tfmp.migrate.tables.api_names import Standing, standing
from tfmp.migrate.tables.contrib_successors import ADVICE, SUCCESSORS, advice

_OF_TENSORFLOW = sorted({successor.name for successor in SUCCESSORS.values() if not successor.module})
# What TensorFlow 2.15 has, and later ones do not, or only with Keras 2.
_GONE = ("estimator.", "nn.rnn_cell.")


@pytest.mark.parametrize("name", _OF_TENSORFLOW)
def test_a_successor_is_in_tensorflow(name: str) -> None:
    if name.startswith(_GONE) and not tf.__version__.startswith("2.15."):
        pytest.skip("needs TensorFlow 2.15")
    found = reduce(getattr, name.split("."), tf.compat.v1)
    module, _, last = f"tensorflow.compat.v1.{name}".rpartition(".")
    # Importing the module of the cells would change what `tf.nn.rnn_cell` is for the tests that follow.
    if not module.endswith(("ModeKeys", "rnn_cell")):
        assert getattr(importlib.import_module(module), last) is found


def test_the_table_of_names_knows_every_successor() -> None:
    for name in _OF_TENSORFLOW:
        assert standing(name) not in (Standing.MISSING, Standing.NEW), name


def test_advice_ends_without_a_period_and_names_what_it_is_about() -> None:
    for name in ADVICE:
        assert advice(name)
        assert not advice(name).endswith(".")
        assert "{" not in advice(name)
    assert advice("layers.conv2d").endswith("write tf_slim.conv2d")
    assert advice("framework.list_variables") == "write tf.train.list_variables, its arguments without their names"
    assert advice("memory_stats.MaxBytesInUse") == ""
