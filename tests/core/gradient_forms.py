"""Makes gradients of all dtypes, dense or as `IndexedSlices`, and runs functions in eager code, traced and by XLA."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfmp.types import Gradient

TYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
FORMS = ["dense", "indexed"]

#: The ways in which a function of tensors may run.
MODES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda function: function,
    "function": tf.function,
    "xla": functools.partial(tf.function, jit_compile=True),
}

in_every_mode = pytest.mark.parametrize("mode", MODES)
of_every_type = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
in_every_form = pytest.mark.parametrize("form", FORMS)


def gradient(values: list[float], dtype: tf.DType = tf.float32, form: str = "dense") -> Gradient:
    """Make a gradient with these values; an `IndexedSlices` has one row for each value."""
    tensor = tf.constant(values, dtype)
    return tensor if form == "dense" else tf.IndexedSlices(tensor, tf.range(len(values)), tf.constant([9]))
