"""Calls one of two functions that change variables, depending on a boolean tensor."""

from collections.abc import Callable

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.tracing import within_xla_for_cpu
from tfmp.types import ChangeVariables, Done, Gradient, Held


def conditional_update(
    flag: tf.Tensor, held: Held, if_true: ChangeVariables, if_false: ChangeVariables | None = None
) -> Done:
    """Call one of two functions with what one replica holds, depending on a boolean tensor."""
    if within_xla_for_cpu():
        false_called = [] if if_false is None else [_call_once_or_never(tf.logical_not(flag), held, if_false)]
        return tf.group(_call_once_or_never(flag, held, if_true), *false_called)

    def done(function: Callable[[], object], value: bool) -> tf.Tensor:
        with tf.control_dependencies([function()]):
            return tf.constant(value)

    def otherwise() -> Done:
        return tf.no_op() if if_false is None else if_false(held)

    return tf.group(tf.cond(flag, lambda: done(lambda: if_true(held), True), lambda: done(otherwise, False)))


def _call_once_or_never(flag: tf.Tensor, held: Held, function: ChangeVariables) -> Done:
    """Call a function in a loop that runs once or not at all.

    For CPUs, XLA updates variables in place if they are changed in a loop, and copies those that are changed in a
    conditional. For GPUs it is the other way round: a conditional copies nothing, and the host would have to wait for
    the condition of a loop.
    """

    def run(times: tf.Tensor) -> tf.Tensor:
        # `times` is always 1 here, but XLA does not know this, because the loop changes it. Without this factor XLA
        # would move arithmetic on the gradients out of the loop, and store its results in memory.
        factor = tf.cast(times, tf.float32)

        def multiplied(grad: Gradient) -> Gradient:
            return arithmetic.map_values(lambda values: values * tf.cast(factor, values.dtype), grad)

        with tf.control_dependencies([function(tf.nest.map_structure(multiplied, held))]):
            return times - 1

    return tf.group(tf.while_loop(lambda times: times > 0, run, [tf.cast(flag, tf.int32)]))
