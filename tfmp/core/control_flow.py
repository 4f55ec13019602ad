"""Calls one of two functions that change variables, by a flag on the device."""

from collections.abc import Callable

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.tracing import within_xla
from tfmp.types import ApplyGradients, Gradients


def conditional_update(
    flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients | None = None
) -> tf.Operation:
    """Call one of two functions with gradients, or one or none.

    Args:
        flag: A boolean scalar.
        grads: The gradients.
        if_true: Called where the flag is true; changes variables.
        if_false: Called where it is false; by default nothing is.

    Returns:
        The op that does so; None in eager mode.

    Example:
        >>> total = tf.Variable(0.0)
        >>> conditional_update(tf.constant(True), [tf.constant(2.0)], lambda grads: total.assign_add(grads[0]))
        >>> float(total)
        2.0
    """
    if within_xla():
        false_called = [] if if_false is None else [_call_once_or_never(tf.logical_not(flag), grads, if_false)]
        return tf.group(_call_once_or_never(flag, grads, if_true), *false_called)

    def done(function: Callable[[], object], value: bool) -> tf.Tensor:
        with tf.control_dependencies([function()]):
            return tf.constant(value)

    def otherwise() -> tf.Operation:
        return tf.no_op() if if_false is None else if_false(grads)

    return tf.group(tf.cond(flag, lambda: done(lambda: if_true(grads), True), lambda: done(otherwise, False)))


def _call_once_or_never(flag: tf.Tensor, grads: Gradients, function: ApplyGradients) -> tf.Operation:
    """Call a function once or not at all, by a loop, which updates variables in place: a conditional copies them."""

    def run(times: tf.Tensor) -> tf.Tensor:
        # The 1 that is left is no constant of the loop. Without it, XLA would take arithmetic on gradients out of the
        # loop, and store what it gives.
        factor = tf.cast(times, tf.float32)
        grads_here = [
            arithmetic.map_values(lambda values: values * tf.cast(factor, values.dtype), grad) for grad in grads
        ]
        with tf.control_dependencies([function(grads_here)]):
            return times - 1

    return tf.group(tf.while_loop(lambda times: times > 0, run, [tf.cast(flag, tf.int32)]))
