"""Finds out whether XLA will compile the graph that is being built as a whole."""

import tensorflow as tf

# An internal module: TensorFlow (2.15 to 2.21) has no public way to ask.
from tensorflow.python.ops import control_flow_util


def within_xla() -> bool:
    """Return whether the running code is being traced for a `tf.function(jit_compile=True)`, directly or nested in one.

    Example:
        >>> within_xla()
        False
        >>> bool(tf.function(lambda: tf.constant(within_xla()), jit_compile=True)())
        True
    """
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
