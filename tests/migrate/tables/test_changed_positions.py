"""The table of changed positions, against TensorFlow."""

import inspect
from functools import reduce

import pytest
import tensorflow as tf

from tfmp.migrate.tables.api_names import Standing, standing
from tfmp.migrate.tables.changed_positions import FIRST_CHANGED

# Another word for the same argument.
_RENAMED = {"filter": "filters", "value": "input"}


def _arguments(module: object, name: str) -> list[str]:
    function = reduce(getattr, name.split("."), module)
    return [_RENAMED.get(word, word) for word in inspect.signature(function).parameters]


@pytest.mark.parametrize(("name", "position"), FIRST_CHANGED.items())
def test_the_first_position_that_differs_is_the_one_of_the_table(name: str, position: int) -> None:
    assert standing(name) is Standing.AMBIGUOUS
    old, new = _arguments(tf.compat.v1, name), _arguments(tf, name)
    assert old[:position] == new[:position]
    assert old[position] != new[position]
