"""The half-precision types."""

import tensorflow as tf

HALF_TYPES = (tf.float16, tf.bfloat16)

HALF_TYPES_BY_NAME = {dtype.name: dtype for dtype in HALF_TYPES}
