"""Windows of micro-batches in the variables of NVIDIA's BERT."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core.control_flow import conditional_update
from tfmp.types import Gradients

tf1 = tf.compat.v1


class NamedWindow:
    """Adds up the gradients of micro-batches in variables whose names a checkpoint of NVIDIA's BERT holds.

        local_step      int32       micro-batches in the window, the last one included
        batch_finite    bool        whether the gradients that were added were all finite, for NVIDIA's script to read
        <var>/accum     float32     the sum of the gradients of each variable

    A window begins where `local_step` is a multiple of the window's length: it overwrites the sums. So nothing is left
    of one that overflowed, and one that a checkpoint holds a part of goes on. `tfmp.GradientAccumulator` counts
    otherwise, under other names, which is why this is not it.

    Args:
        variables: The variables to train, each of which has a sum.
        length: Micro-batches in a window.

    Example:
        >>> with tf.Graph().as_default(), tf1.Session() as session:
        ...     w = tf1.get_variable("w", initializer=1.0)
        ...     window = NamedWindow([w], length=2)
        ...     step = window.add([tf.constant(2.0)], lambda grads: tf.group(w.assign_sub(grads[0])), tf.constant(True))
        ...     session.run(tf1.global_variables_initializer())
        ...     for _ in range(4):
        ...         _, ends = session.run([step, "update_step:0"])
        ...         bool(ends), float(session.run(w))
        (False, 1.0)
        (True, -3.0)
        (False, -3.0)
        (True, -7.0)
    """

    def __init__(self, variables: Sequence[tf.Variable], length: int) -> None:
        self._length = length
        self._local_step = tf1.get_variable("local_step", [], tf.int32, tf1.zeros_initializer(), trainable=False)
        self._batch_finite = tf1.get_variable("batch_finite", [], tf.bool, tf1.ones_initializer(), trainable=False)
        self._sums = [
            tf1.get_variable(
                f"{variable.op.name}/accum", variable.shape, tf.float32, tf1.zeros_initializer(), trainable=False
            )
            for variable in variables
        ]

    def add(self, grads: Gradients, apply_fn: Callable[[Gradients], tf.Operation], finite: tf.Tensor) -> tf.Operation:
        """Add the gradients of a micro-batch, and apply the sums if it ends the window.

        Whether it does can be fetched as `update_step:0`, together with the op: fetching it adds the micro-batch too.

        Args:
            grads: A gradient for each variable, dense; None where there is none, whose sum is None too.
            apply_fn: Called once, in a conditional, with the sums.
            finite: Whether the gradients are finite everywhere, a boolean scalar.

        Returns:
            The op that does so.
        """
        pairs = [(total, grad) for total, grad in zip(self._sums, grads, strict=True) if grad is not None]
        totals, given = [total for total, _ in pairs], [tf.cast(grad, tf.float32) for _, grad in pairs]
        # New values, all of them: a reference variable's read shares its memory.
        before = self._local_step.read_value()
        begins = tf.equal(before % self._length, 0)
        taken = tf.where(begins, 1, before + 1)
        so_far = tf.logical_or(begins, self._batch_finite.read_value())

        def begin(values: Gradients) -> tf.Operation:
            return tf.group(*(total.assign(value) for total, value in zip(totals, values, strict=True)))

        def go_on(values: Gradients) -> tf.Operation:
            return tf.group(*(total.assign_add(value) for total, value in zip(totals, values, strict=True)))

        # A run that fails for want of gradients, as at the end of the input, is to count nothing.
        with tf.control_dependencies([conditional_update(begins, given, begin, go_on)]):
            counted = tf.group(
                self._local_step.assign(taken), self._batch_finite.assign(tf.logical_and(so_far, finite))
            )
        with tf.control_dependencies([counted]):
            ends = tf.identity(tf.equal(taken % self._length, 0), name="update_step")

        def end(_: Gradients) -> tf.Operation:
            return apply_fn(
                [None if grad is None else total.read_value() for total, grad in zip(self._sums, grads, strict=True)]
            )

        return conditional_update(ends, [], end)
