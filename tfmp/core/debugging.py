"""Finds out whether TensorFlow's debugging tools add ops to the graphs that are being built."""

# An internal module: TensorFlow (2.15 to 2.21) has no public way to ask.
from tensorflow.python.framework import op_callbacks


def ops_are_watched() -> bool:
    """Return whether a debugging tool adds an op of its own after each op that this thread builds.

    `tf.debugging.enable_check_numerics` and `tf.debugging.experimental.enable_dump_debug_info` do so. XLA cannot
    compile the ops that they add, so nothing should be compiled while they are enabled.

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
