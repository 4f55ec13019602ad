"""Adds up the gradients of several micro-batches, to be applied as those of one batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core import numerics, settings
from tfmp.core.autograph import without_autograph
from tfmp.core.conditionals import call_either
from tfmp.core.inspection import Inspection
from tfmp.core.overflow import KINDS, OverflowDetector, validated_detector
from tfmp.core.xla import within_xla
from tfmp.types import AddBuffer, Gradient, Gradients

#: What an overflow makes invalid.
OVERFLOW_DROPS = ("window", "micro_batch")


class AccumulationSettings(NamedTuple):
    """How gradients are accumulated; `accumulation_settings` makes them of what a user gave.

    Attributes:
        accumulation_steps: Micro-batches in a window.
        overflow_drops: What an overflow makes invalid, one of `OVERFLOW_DROPS`.
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full; None if never.
    """

    accumulation_steps: int
    overflow_drops: str
    micro_batches_per_epoch: int | None


class Window(NamedTuple):
    """What a replica knows of a window that has ended, and of the same window on the others.

    Attributes:
        grads: The replica's part of the gradients: their sum over the replicas, times the number of replicas if they
            take the mean, is what a batch of all kept micro-batches would give.
        usable: Whether they may be applied; bool, the same on all replicas.
        complete: Whether no micro-batch overflowed on any replica; bool.
        overflows: What was wrong with this replica's micro-batches, as `OverflowDetector.counts` tells; int64.
        emptied: The op that empties the window; None in eager mode.
    """

    grads: list[Gradient]
    usable: tf.Tensor
    complete: tf.Tensor
    overflows: tf.Tensor
    emptied: tf.Operation


class GradientAccumulator(tf.Module):
    """Adds up the gradients of several micro-batches, to be applied as those of one batch.

    The rule, for the gradients `g` of each micro-batch, in true magnitude and float32 (float64 where the variable is):

        add      tried += 1;  sum += g and kept += 1 if g is finite
        mean     sum / kept
        usable   kept = tried                   if an overflow drops the window
                 kept > 0                       if it drops the micro-batch

    So the divisor is right for a window that ends early. Each replica of a `tf.distribute` strategy, and each process
    of Horovod, has sums of its own, which are shared when the window ends: then `kept` and `tried` are those of all.

    A variable keeps None for a gradient until a micro-batch gives it one, and has zeros from then on where none does;
    which have had one, a checkpoint does not tell. A gradient that came as `IndexedSlices` is one again, of the rows
    whose sum is not 0; of all rows within XLA.

    Args:
        variables: The variables to train, of TensorFlow or Keras. Make the accumulator in the strategy's scope.
        accumulation_steps: Micro-batches in a window, after which `is_full`.
        overflow_drops: `"window"`: if a micro-batch overflows, the step is skipped. `"micro_batch"`: it is taken with
            the others, and divided by their number.
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full, the number of those
            in an epoch, or in the whole training; counting then begins anew. By default windows end when full.
        overflow_detector: What counts as overflow; a `tfmp.NonFiniteDetector` unless given.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: There are no variables, or a setting is out of range.

    Example:
        >>> import tfmp
        >>> w = tf.Variable([1.0, 2.0])
        >>> accumulator = tfmp.GradientAccumulator([w], accumulation_steps=2)
        >>> for grad in [[2.0, 4.0], [4.0, 8.0]]:
        ...     accumulator.add([tf.constant(grad)])
        >>> bool(accumulator.is_full), accumulator.mean()[0].numpy().tolist()
        (True, [3.0, 6.0])

    Source: the accumulation of torch.amp's examples and of MMCV, whose divisor is right for a shorter window.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        accumulation_steps: int,
        *,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        overflow_detector: OverflowDetector | None = None,
        add_buffer: AddBuffer | None = None,
    ) -> None:
        super().__init__()
        self._settings = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        if not variables:
            raise ValueError("variables is empty: pass the variables to train.")
        self._detector = validated_detector(overflow_detector)
        self._dtypes = [tf.as_dtype(variable.dtype).base_dtype for variable in variables]
        # Of which variables there was a gradient, and a sparse one.
        self._given: set[int] = set()
        self._sparse: set[int] = set()
        add = add_buffer or _add_buffer
        with tf.init_scope():
            #: The sums, one for each variable.
            self.sums = [
                add(f"sum_{index}", variable.shape.as_list(), _wide(dtype))
                for index, (variable, dtype) in enumerate(zip(variables, self._dtypes, strict=True))
            ]
            self.kept = add("kept", [], tf.float32)
            self.tried = add("tried", [], tf.float32)
            self.tried_in_epoch = add("tried_in_epoch", [], tf.float32)
            # Not int64: when a checkpoint is restored on replicas, each gets its part of the sum.
            self.overflows = add("overflows", [len(variables), len(KINDS)], tf.float64)

    @property
    def variables_of_state(self) -> list[tf.Variable]:
        """All variables that hold the window."""
        return [*self.sums, self.kept, self.tried, self.tried_in_epoch, self.overflows]

    @property
    def is_full(self) -> tf.Tensor:
        """Whether the window has ended: it is full, or the epoch is over; a boolean scalar."""
        full = self.tried.read_value() >= self._settings.accumulation_steps
        per_epoch = self._settings.micro_batches_per_epoch
        if per_epoch is None:
            return full
        return tf.logical_or(full, self.tried_in_epoch.read_value() >= per_epoch)

    @without_autograph
    def add(self, grads: Gradients, loss_scale: tf.Tensor | float = 1.0) -> tf.Operation:
        """Add the gradients of a micro-batch, unless they overflowed.

        Args:
            grads: The replica's gradients, one for each variable; None adds nothing.
            loss_scale: The scale of the loss that they are of, such as `GradScaler.loss_scale`.

        Returns:
            The op that does it; None in eager mode.

        Raises:
            ValueError: There are not as many gradients as variables; or every gradient is None.
        """
        loss_scale = tf.convert_to_tensor(loss_scale, tf.float32)
        return self.add_unscaled(numerics.unscale(grads, loss_scale), loss_scale)

    @without_autograph
    def add_unscaled(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Operation:
        """Add gradients that are in true magnitude already; else as `add`.

        Args:
            grads: The replica's gradients.
            loss_scale: The scale that they were found with, for the overflow detector.

        Returns:
            The op that does it; None in eager mode.
        """
        self._validate(grads)
        inspection = Inspection(self._detector, loss_scale)

        def keep(grads: Gradients) -> tf.Operation:
            return tf.group(*map(_add_to, self.sums, grads), self.kept.assign_add(1.0))

        def drop(grads: Gradients) -> tf.Operation:
            return tf.group(self.overflows.assign_add(tf.cast(inspection.counts(grads), tf.float64)))

        # In a graph, a run that fails for want of gradients, as at the end of the input, must count nothing.
        with tf.control_dependencies([call_either(inspection.all_finite(grads), grads, keep, drop)]):
            return tf.group(self.tried.assign_add(1.0), self.tried_in_epoch.assign_add(1.0))

    @without_autograph
    def mean(self) -> list[Gradient]:
        """Return the mean of what this replica's window holds, in the variables' types; NaN if it holds nothing."""
        return self._scaled_sums(1 / self.kept.read_value())

    @without_autograph
    def reset(self) -> tf.Operation:
        """Empty the window.

        Returns:
            The op that does it; None in eager mode.
        """
        per_epoch = self._settings.micro_batches_per_epoch
        in_epoch = self.tried_in_epoch.read_value()
        next_in_epoch = tf.zeros([]) if per_epoch is None else tf.where(in_epoch >= per_epoch, 0.0, in_epoch)
        emptied = [*self.sums, self.kept, self.tried, self.overflows]
        return tf.group(
            *(variable.assign(tf.zeros(variable.shape, variable.dtype.base_dtype)) for variable in emptied),
            self.tried_in_epoch.assign(next_in_epoch),
        )

    def take(self, total: Callable[[tf.Tensor], tf.Tensor]) -> Window:
        """Return what the window holds, and empty it.

        Args:
            total: Sums a tensor over the replicas.
        """
        kept, tried, replicas = tf.unstack(total(tf.stack([self.kept.read_value(), self.tried.read_value(), 1.0])))
        complete = tf.equal(kept, tried)
        overflows = tf.cast(tf.math.ceil(self.overflows.read_value()), tf.int64)
        # Of an empty window the sums are 0: as NaN they would be counted as an overflow of every variable.
        grads = self._scaled_sums(tf.math.divide_no_nan(replicas, kept))
        with tf.control_dependencies([*numerics.values_of(grads), overflows, complete]):
            emptied = self.reset()
        usable = complete if self._settings.overflow_drops == "window" else kept > 0
        return Window(grads, usable, complete, overflows, emptied)

    def _scaled_sums(self, factor: tf.Tensor) -> list[Gradient]:
        grads: list[Gradient] = []
        for index, (variable, dtype) in enumerate(zip(self.sums, self._dtypes, strict=True)):
            grad = None
            if index in self._given:
                values = variable.read_value()
                grad = _rows_not_zero(values) if index in self._sparse else values
            scaled = numerics.map_values(lambda values: values * tf.cast(factor, values.dtype), grad)
            grads.append(numerics.cast(scaled, dtype))
        return grads

    def _validate(self, grads: Gradients) -> None:
        if len(grads) != len(self.sums):
            raise ValueError(
                f"there are {len(grads)} gradients for {len(self.sums)} variables: pass one for each, None where the "
                "loss does not depend on it."
            )
        given = {index for index, grad in enumerate(grads) if grad is not None}
        if not given:
            raise ValueError("every gradient is None: the loss depends on none of the variables.")
        self._given |= given
        self._sparse |= {index for index in given if isinstance(grads[index], tf.IndexedSlices)}
        self._sparse -= {index for index in given if not isinstance(grads[index], tf.IndexedSlices)}


def accumulation_settings(
    accumulation_steps: int, overflow_drops: str, micro_batches_per_epoch: int | None
) -> AccumulationSettings:
    """Return the settings that a user gave, or say what is wrong with them.

    Args:
        accumulation_steps: Micro-batches in a window.
        overflow_drops: What an overflow makes invalid.
        micro_batches_per_epoch: After how many micro-batches a window ends at the latest.

    Raises:
        TypeError: A number is none.
        ValueError: A setting is out of range.

    Example:
        >>> accumulation_settings(0, "window", None)
        Traceback (most recent call last):
            ...
        ValueError: accumulation_steps must be a whole number from 1 to 2**31 - 1, got 0.
    """
    if overflow_drops not in OVERFLOW_DROPS:
        raise ValueError(f'overflow_drops must be "window" or "micro_batch", got {overflow_drops!r}.')
    per_epoch = None
    if micro_batches_per_epoch is not None:
        per_epoch = settings.count("micro_batches_per_epoch", micro_batches_per_epoch)
    return AccumulationSettings(settings.count("accumulation_steps", accumulation_steps), overflow_drops, per_epoch)


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in numerics.HALF_TYPES else dtype


def _add_buffer(name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    # Each replica has its own; a checkpoint holds their sum. In a graph `tf.Variable` would put each replica's part
    # among the global variables, to be saved and restored beside the sum.
    return tf.compat.v1.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=name,
        use_resource=True,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _add_to(variable: tf.Variable, grad: Gradient) -> Any:  # noqa: ANN401 - an op, or what a variable returns
    if grad is None:
        return tf.no_op()
    if isinstance(grad, tf.IndexedSlices) and not tf.distribute.has_strategy():
        return variable.scatter_add(numerics.cast(grad, variable.dtype.base_dtype))
    # A replica's own variable knows no scatter_add.
    return variable.assign_add(tf.cast(numerics.densify(grad), variable.dtype.base_dtype))


def _rows_not_zero(values: tf.Tensor) -> tf.IndexedSlices:
    if within_xla():
        # How many rows there are must not depend on values: of those that XLA pads with, optimizers apply some.
        return tf.IndexedSlices(values, tf.range(tf.shape(values)[0]), tf.shape(values))
    rows = tf.reshape(values, [tf.shape(values)[0], -1])
    indices = tf.where(tf.reduce_any(tf.not_equal(rows, 0), axis=1))[:, 0]
    return tf.IndexedSlices(tf.gather(values, indices), indices, tf.shape(values))
