"""Tells whether TensorFlow's debugger watches the ops that are built."""

# TensorFlow (2.15 to 2.21) has no public way to ask.
from tensorflow.python.framework import op_callbacks


def ops_are_watched() -> bool:
    """Return whether something adds ops of its own behind each op that this thread builds.

    `tf.debugging.enable_check_numerics` does, and `tf.debugging.experimental.enable_dump_debug_info`. XLA compiles none
    of what they add.

    Example:
        >>> import tensorflow as tf
        >>> tf.debugging.enable_check_numerics()
        >>> ops_are_watched()
        True
        >>> tf.debugging.disable_check_numerics()
        >>> ops_are_watched()
        False
    """
    return bool(op_callbacks.should_invoke_op_callbacks())
