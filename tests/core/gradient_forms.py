"""Makes gradients of all dtypes, dense or as `IndexedSlices`, for tests."""

import tensorflow as tf

from tfmp.types import Gradient

TYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
FORMS = ["dense", "indexed"]


def gradient(values: list[float], dtype: tf.DType = tf.float32, form: str = "dense") -> Gradient:
    """Make a gradient with these values; an `IndexedSlices` has one row for each value."""
    tensor = tf.constant(values, dtype)
    return tensor if form == "dense" else tf.IndexedSlices(tensor, tf.range(len(values)), tf.constant([9]))
