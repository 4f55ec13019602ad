"""Fingerprints of settings: equal if nothing has changed, different if anything has."""

import collections
import gc
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmp.hosts.keras.programs.fingerprint import Fingerprint

_DIFFERENT = [
    *((1, True), (1, 1.0), (0.0, -0.0), (None, 0), ("a", b"a"), ([1, 2], [2, 1]), ([1, [2]], [1, 2])),
    *(({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({1, 2}, {1, 3}), (np.float32(1), np.float64(1))),
    *((np.array([1, 2]), np.array([1, 3])), (np.array([1, 2]), np.array([[1, 2]])), (abs, max)),
    *((np.zeros(2, np.int32), np.zeros(1, np.int64)), (tf.constant(1.0), tf.constant(1.0))),
    *((tf.Variable(1.0), tf.Variable(1.0)), (keras.constraints.MaxNorm(1.0), keras.constraints.MaxNorm(1.0))),
]


def _key(*settings: Any) -> Any:
    return Fingerprint(settings).key


@pytest.mark.parametrize(("one", "other"), _DIFFERENT)
def test_different_settings_have_different_keys(one: Any, other: Any) -> None:
    assert _key(one) != _key(other)
    assert (_key(one), _key(other)) == (_key(one), _key(other))
    assert hash(_key(one)) == hash(_key(one))


def test_equal_lists_and_arrays_and_nan_have_equal_keys() -> None:
    assert _key([1, (2, "a")], {"a": np.ones(2)}, {3, 4}) == _key([1, (2, "a")], {"a": np.ones(2)}, {4, 3})
    assert _key(float("nan"), np.float32("nan")) == _key(float("nan"), np.float32("nan"))


def test_attributes_of_keras_objects_that_refer_to_each_other_are_read_once() -> None:
    one, other = keras.constraints.MaxNorm(1.0), keras.constraints.MaxNorm(1.0)
    one.other, other.other = other, one
    before = _key(one)
    other.max_value = 2.0
    assert _key(one) != before


def test_objects_whose_attributes_are_not_read_make_a_fingerprint_incomplete() -> None:
    own = type("Own", (), {})
    complete = [keras.optimizers.Adam(0.5), keras.constraints.MaxNorm(1.0), tf.Variable(1.0), np.ones(2), len, own]
    assert Fingerprint([*complete, {"name": [1, None, re.compile("a")]}]).is_complete
    assert not Fingerprint([{"name": [own()]}]).is_complete
    assert not Fingerprint([collections.deque([1])]).is_complete


def test_references_end_with_their_objects() -> None:
    variable = tf.Variable(1.0)
    fingerprint = Fingerprint([variable])
    references = fingerprint.references()
    assert [reference() is variable for reference in references] == [True]
    del fingerprint, variable
    gc.collect()
    assert [reference() for reference in references] == [None]
