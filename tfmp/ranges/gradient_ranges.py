"""Counts, on the device, the powers of two of each gradient on the steps that the user requests."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.gradients import arithmetic
from tfmp.core.step.properties import StepProperties
from tfmp.core.storage.state_variables import ByVariables, NotCheckpointed, StateVariables
from tfmp.ranges.exponents import NUM_COUNTS, exponent_counts
from tfmp.types import Done, Gradient, Gradients


class StepsWithRanges(StepProperties):
    """The base of classes whose steps can record the powers of two of their gradients."""

    def record_gradient_ranges(self) -> "GradientRanges":
        """Let the steps that are built from now on record the powers of two of their gradients when asked.

        A step is recorded only after a call of the object's `request`; every other step only reads a flag. This works
        in eager code and in a `tf.function`, unless the function was traced before. In TF1 graphs,
        `tfmp.LossScaleLoggingHook` fetches the gradients themselves.

        Returns:
            The object with which you request a step and read what it recorded; the same one at each call. `request()`
            asks for the next step, and `read()` returns what was recorded: for each list of variables their `names`,
            and the `counts` of their unscaled gradients as `tfmp.ranges.exponent_counts` returns them.

        Examples:
            >>> import tfmp
            >>> scaler = tfmp.GradScaler()
            >>> ranges = scaler.record_gradient_ranges()
            >>> w = tf.Variable([0.5, 3.0])
            >>> optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
            >>> ranges.request()
            >>> with tf.GradientTape() as tape:
            ...     loss = scaler.scale(tf.reduce_sum(w ** 2))
            >>> _ = scaler.step(optimizer, zip(tape.gradient(loss, [w]), [w]))
            >>> _ = scaler.update()
            >>> tfmp.ranges.RangeHistogram(ranges.read()[0].counts[0])
            <RangeHistogram of 2 values, 2^0..2^2>

        Provisional: a minor version may change it and what it returns.
        """
        if not isinstance(self._scaler.monitor, GradientRanges):
            self._scaler.monitor = GradientRanges()
        return self._scaler.monitor


class RecordedRanges(NamedTuple):
    """The powers of two of the unscaled gradients of a step.

    Attributes:
        names: The names of the variables, or their paths in Keras 3.
        counts: A row of `tfmp.ranges.exponent_counts` for each variable, summed over the replicas. Where replicas
            average their gradients before the step (Keras 2, Horovod), each counts the same means.
    """

    names: list[str]
    counts: np.ndarray


class GradientRanges(NotCheckpointed):
    """The powers of two of the gradients of the last step that was recorded.

    A step is recorded if `request` was called before it. On other steps nothing is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requested = False
        self._each = ByVariables(self._new_record)

    def request(self) -> None:
        """Request that the next step is recorded.

        Call this in eager code, also if a `tf.function` takes the steps. With several lists of variables, the next step
        of each is recorded.
        """
        self._requested = True
        for record in self._each:
            record.state.create().due.assign(True)

    def read(self) -> list[RecordedRanges]:
        """Return what was recorded on the step that was requested last, for each list of variables.

        Call this in eager code. The list is empty as long as no step was taken since the request.
        """
        states = [(record.names, record.state.read()) for record in self._each]
        return [
            RecordedRanges(list(names), state.counts.numpy())
            for names, state in states
            if state.counts.numpy().any() and not bool(state.due)
        ]

    def _record(
        self, names: Sequence[str], grads: Gradients, loss_scale: tf.Tensor | None, distribution: Distribution
    ) -> Done:
        """Count this replica's gradients if the step was requested; `loss_scale` is None if they are unscaled."""
        state = self._each.of(names).state
        present = [grad for grad in grads if grad is not None]
        dtypes = [values.dtype for values in arithmetic.values_of(present)]

        def count(integers: Gradients) -> Done:
            given = _bitcast(integers, dtypes)
            here = iter(given if loss_scale is None else arithmetic.unscale(given, loss_scale))
            counts_here = exponent_counts([None if grad is None else next(here) for grad in grads])
            counts = distribution.total(counts_here, "gradient_ranges")
            return distribution.once(lambda: state.assign(_State(tf.constant(False), counts)))

        # As integers: within XLA the conditional is a loop that multiplies what it is given by 1, and a floating-point
        # multiplication replaces subnormal numbers by 0.
        integers = _bitcast(present, [_INTEGERS[dtype.size] for dtype in dtypes])
        return distribution.conditional_update(state.get("due"), integers, count, lambda _: tf.no_op())

    def _new_record(self, names: Sequence[str]) -> "_Record":
        initial = _State(np.bool_(self._requested), np.zeros([len(names), NUM_COUNTS], np.int64))
        return _Record(tuple(names), StateVariables(initial, saved=False))


#: The types of integers by their size in bytes.
_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class _State(NamedTuple):
    due: tf.Tensor
    counts: tf.Tensor


class _Record(NamedTuple):
    names: tuple[str, ...]
    state: "StateVariables[_State]"


def _bitcast(grads: Gradients, dtypes: Sequence[tf.DType]) -> list[Gradient]:
    """Return the bits of the gradients as values of other types of the same size."""
    return [
        arithmetic.map_values(functools.partial(tf.bitcast, type=dtype), grad)
        for grad, dtype in zip(grads, dtypes, strict=True)
    ]
