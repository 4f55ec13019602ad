"""Gradient accumulation in variables that have the names of those in NVIDIA's BERT."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core.tracing import conditional_update
from tfmp.types import Gradients

tf1 = tf.compat.v1


class NamedWindow:
    """Adds up the gradients of micro-batches in variables that have the names of those in NVIDIA's BERT.

    A window is the group of `length` micro-batches whose gradients make one step. The variables are

        local_step      int32       the number of micro-batches in the window so far, including the last one
        batch_finite    bool        whether all gradients added so far were finite; NVIDIA's script reads it
        <var>/accum     float32     the sum of the gradients of each variable

    A window begins when `local_step` is a multiple of `length`. Its first micro-batch overwrites the sums, so nothing
    remains of an earlier window that overflowed. A checkpoint that was saved within a window restores its sums, and the
    window continues. The class does not use `tfmp.GradientAccumulator`, because that counts in another way and has
    variables of other names, so it could not restore the checkpoints of NVIDIA's script.

    Examples:
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
        """Add the gradients of a micro-batch, and apply the sums if the micro-batch is the last one of its window.

        The boolean tensor `update_step:0` tells whether it is the last one. Fetch this tensor together with the
        returned op, because fetching it alone also adds the micro-batch.

        The gradients are dense, or None where the loss does not depend on a variable; `finite` tells whether all are.
        `apply_fn` is called once, while the graph is built, inside a conditional, with the sum for each variable (None
        where the gradient is None).
        """
        pairs = [(total, grad) for total, grad in zip(self._sums, grads, strict=True) if grad is not None]
        totals, given = [total for total, _ in pairs], [tf.cast(grad, tf.float32) for _, grad in pairs]
        # Only tensors computed from the reads are used after the assignments below. A read of a reference variable
        # shares the variable's memory, so an assignment would change it.
        before = self._local_step.read_value()
        begins = tf.equal(before % self._length, 0)
        taken = tf.where(begins, 1, before + 1)
        so_far = tf.logical_or(begins, self._batch_finite.read_value())

        def begin(values: Gradients) -> tf.Operation:
            return tf.group(*(total.assign(value) for total, value in zip(totals, values, strict=True)))

        def go_on(values: Gradients) -> tf.Operation:
            return tf.group(*(total.assign_add(value) for total, value in zip(totals, values, strict=True)))

        # Counted after the sums: a run that fails before it has gradients, as at the end of the input, counts nothing.
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
