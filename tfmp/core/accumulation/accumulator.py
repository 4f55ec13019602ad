"""Adds up the gradients of several micro-batches, to be applied as those of one batch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.core.control_flow import conditional_update
from tfmp.core.gradients import arithmetic
from tfmp.core.overflow.detectors import KINDS, OverflowDetector, validated_detector
from tfmp.core.overflow.gradient_check import GradientCheck
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.core.tracing import without_autograph
from tfmp.types import AddBuffer, Gradient, Gradients


class GradientAccumulator(tf.Module):
    """Adds up the gradients of several micro-batches, to be applied as those of one batch.

    The rule, for the gradients `g` of each micro-batch, in true magnitude and float32 (float64 where the variable is):

        add      tried += 1;  sum += g and kept += 1 if g is finite
        mean     sum / kept
        usable   kept = tried                   if an overflow drops the window
                 kept > 0                       if it drops the micro-batch

    So the divisor is right for a window that ends early. Each replica of a `tf.distribute` strategy, and each process
    of Horovod, has sums of its own, which are shared when the window ends: then `kept` and `tried` are those of all.

    A variable keeps None for a gradient until a micro-batch gives it one, and has zeros from then on where none does. A
    `tf.function` that ends a window leaves out, for good, variables that had none when it was traced: a gradient that
    comes later is refused. After restoring a checkpoint, eager code takes for given what has a sum other than 0, and a
    graph only what its own micro-batches give. A gradient that came as `IndexedSlices` is one again, of the rows
    whose sum is not 0; of all rows within XLA.

    Args:
        variables: The variables to train, of TensorFlow or Keras. Make the accumulator in the strategy's scope.
        accumulation_steps: Micro-batches in a window, after which `is_full`.
        overflow_drops: `"window"`: if a micro-batch overflows, the step is skipped. `"micro_batch"`: it is taken with
            the others, and divided by their number.
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full, the number of those
            in an epoch, or in the whole training; counting then begins anew. By default windows end when full.
        overflow_detector: What counts as overflow; a `tfmp.NonFiniteDetector` unless given.
        keeps_float32: Leave the mean in float32 for variables of half precision, for an optimizer that updates a
            float32 copy of them.

    Attributes:
        sums: The sums of the micro-batches that were kept, one for each variable.
        kept: How many they are; float64.
        tried: How many there were in the window; float64.
        tried_in_epoch: How many since the epoch began, or the window if there are no epochs; float64.
        largest: The largest magnitude in those that were kept, if it was asked for; float32.
        overflows: What was wrong with those that were not, as `OverflowDetector.counts` tells; float64.

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
        variables: Iterable[tf.Variable],
        accumulation_steps: int,
        *,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        overflow_detector: OverflowDetector | None = None,
        add_buffer: AddBuffer | None = None,
        keeps_float32: bool = False,
    ) -> None:
        super().__init__()
        self._settings = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        variables = lists.variables("variables", variables)
        if not variables:
            raise ValueError("variables is empty: pass the variables to train.")
        self._detector = validated_detector(overflow_detector)
        dtypes = [tf.as_dtype(variable.dtype).base_dtype for variable in variables]
        sum_dtypes = [_wide(dtype) for dtype in dtypes]
        self._dtypes = sum_dtypes if keeps_float32 else dtypes
        self._names = [variable.name for variable in variables]
        self._strategy = tf.distribute.get_strategy()
        # Of which variables there was a gradient, and a sparse one; and which a graph leaves out of a window's end.
        self._given: set[int] = set()
        self._sparse: set[int] = set()
        self._left_out: set[int] = set()
        add = add_buffer or _add_buffer
        with tf.init_scope():
            self.sums = [
                add(f"sum_{index}", variable.shape.as_list(), dtype)
                for index, (variable, dtype) in enumerate(zip(variables, sum_dtypes, strict=True))
            ]
            # Not int64: when a checkpoint is restored on replicas, each gets its part of the sum. Float32 would stop
            # counting at 2**24.
            self.kept = add("kept", [], tf.float64)
            self.tried = add("tried", [], tf.float64)
            self.tried_in_epoch = add("tried_in_epoch", [], tf.float64)
            # A checkpoint of replicas holds the sum, of which each gets a part: at most what the largest was.
            self.largest = add("largest", [], tf.float32)
            self.overflows = add("overflows", [len(variables), len(KINDS)], tf.float64)

    @property
    def is_full(self) -> tf.Tensor:
        """Whether the window has ended: it is full, or the epoch is over; a boolean scalar.

        It may be asked for on a strategy's replicas, and outside of them, after `strategy.run`.

        Example:
            >>> accumulator = GradientAccumulator([tf.Variable(0.0)], 2, micro_batches_per_epoch=3)
            >>> for _ in range(3):
            ...     accumulator.add([tf.constant(1.0)])
            ...     print(bool(accumulator.is_full))
            ...     if accumulator.is_full:
            ...         accumulator.reset()
            False
            True
            True
        """
        # Outside of the replicas a read gives the sum over them.
        readers = 1 if self._is_on_replica() else self._strategy.num_replicas_in_sync
        full = self.tried.read_value() / readers >= self._settings.accumulation_steps
        per_epoch = self._settings.micro_batches_per_epoch
        if per_epoch is None:
            return full
        return tf.logical_or(full, self.tried_in_epoch.read_value() / readers >= per_epoch)

    @without_autograph
    def add(self, grads: Iterable[Gradient], loss_scale: tf.Tensor | float = 1.0) -> tf.Operation:
        """Add the gradients of a micro-batch, unless they overflowed.

        Args:
            grads: The replica's gradients, one for each variable; None adds nothing.
            loss_scale: The scale of the loss that they are of, such as `GradScaler.loss_scale`: a scalar tensor, or a
                number.

        Returns:
            The op that does it; None in eager mode. In a graph of TF1 nothing orders it and what reads the window, but
            control dependencies.

        Raises:
            ValueError: There are not as many gradients as variables; or every gradient is None; or one is of a variable
                that a traced end of the window leaves out; or the scale is not finite, or not above 0.
            TypeError: These are no gradients, or the scale is no number.
            RuntimeError: It is called outside of the replicas of the strategy in whose scope the accumulator was made.

        Example:
            >>> accumulator = GradientAccumulator([tf.Variable(0.0)], 2)
            >>> accumulator.add([tf.constant(16.0)], loss_scale=8.0)
            >>> accumulator.add([tf.constant(float("inf"))], loss_scale=8.0)
            >>> float(accumulator.sums[0]), float(accumulator.kept), float(accumulator.tried)
            (2.0, 1.0, 2.0)
        """
        if tf.is_tensor(loss_scale):
            loss_scale = tf.cast(loss_scale, tf.float32)
        else:
            loss_scale = tf.constant(settings.positive("loss_scale", loss_scale), tf.float32)
        return self.add_unscaled(arithmetic.unscale(lists.gradients(grads), loss_scale), loss_scale)

    @without_autograph
    def add_unscaled(
        self, grads: Iterable[Gradient], loss_scale: tf.Tensor, *, keeps_max_abs: bool = True
    ) -> tf.Operation:
        """Add gradients that are in true magnitude already; else as `add`.

        Args:
            grads: The replica's gradients.
            loss_scale: The scale that they were found with, for the overflow detector.
            keeps_max_abs: Whether someone will ask for the largest magnitude.

        Returns:
            The op that does it; None in eager mode.
        """
        grads = lists.gradients(grads)
        self._refuse_outside_of_replicas()
        self._validate(grads)
        check = GradientCheck(self._detector, loss_scale)
        max_abs = [check.max_abs(grads)] if keeps_max_abs else []

        def keep(grads: Gradients) -> tf.Operation:
            largest = [self.largest.assign(tf.reduce_max([self.largest.read_value(), *max_abs]))] if max_abs else []
            return tf.group(*map(_add_to, self.sums, grads), self.kept.assign_add(1.0), *largest)

        def drop(grads: Gradients) -> tf.Operation:
            return tf.group(self.overflows.assign_add(tf.cast(check.counts(grads), tf.float64)))

        # In a graph, a run that fails for want of gradients, as at the end of the input, must count nothing.
        with tf.control_dependencies([conditional_update(check.all_finite(grads), grads, keep, drop)]):
            return tf.group(self.tried.assign_add(1.0), self.tried_in_epoch.assign_add(1.0))

    @without_autograph
    def mean(self) -> list[Gradient]:
        """Return the mean of what this replica's window holds; divided by the number that this replica has kept.

        On several replicas, which may have kept different numbers, `GradScaler.unscale(optimizer, accumulator)` divides
        by that of all.

        Returns:
            A gradient for each variable, in its type unless the accumulator keeps float32; NaN where every micro-batch
            overflowed, None where none had one.

        Raises:
            RuntimeError: The window is empty, in eager code; or it is called outside of the replicas.

        Example:
            >>> accumulator = GradientAccumulator([tf.Variable(0.0), tf.Variable(0.0)], 4)
            >>> for grad in (1.0, 5.0):
            ...     accumulator.add([tf.constant(grad), None])
            >>> float(accumulator.mean()[0]), accumulator.mean()[1] is None
            (3.0, True)
        """
        self._refuse_outside_of_replicas()
        self._refuse_if_empty()
        kept = self.kept.read_value()
        return self._divided_sums(lambda values: values / tf.cast(kept, values.dtype))

    @without_autograph
    def reset(self) -> tf.Operation:
        """Empty the window.

        Returns:
            The op that does it; None in eager mode.

        Raises:
            RuntimeError: It is called outside of the replicas.

        Example:
            >>> accumulator = GradientAccumulator([tf.Variable(0.0)], 4)
            >>> accumulator.add([tf.constant(1.0)])
            >>> accumulator.reset()
            >>> float(accumulator.tried), float(accumulator.sums[0])
            (0.0, 0.0)
        """
        self._refuse_outside_of_replicas()
        per_epoch = self._settings.micro_batches_per_epoch
        in_epoch = self.tried_in_epoch.read_value()
        zero = tf.zeros([], in_epoch.dtype)
        next_in_epoch = zero if per_epoch is None else tf.where(in_epoch >= per_epoch, zero, in_epoch)
        emptied = [*self.sums, self.kept, self.tried, self.largest, self.overflows]
        return tf.group(
            *(variable.assign(tf.zeros(variable.shape, variable.dtype.base_dtype)) for variable in emptied),
            self.tried_in_epoch.assign(next_in_epoch),
        )

    def drain(self, total: Callable[[tf.Tensor], tf.Tensor]) -> tuple[list[Gradient], LocalCheck]:
        """Return what the window holds, and empty it.

        Args:
            total: Sums a tensor over the replicas.

        Returns:
            The replica's part of the gradients: their sum over the replicas, times the number of replicas if they take
            the mean, is what a batch of all kept micro-batches would give. And what is known of them, on all replicas.

        Raises:
            RuntimeError: The window is empty, in eager code; or it is called outside of the replicas.
        """
        self._refuse_outside_of_replicas()
        self._refuse_if_empty()
        counts = tf.stack([self.kept.read_value(), self.tried.read_value(), tf.ones([], tf.float64)])
        kept, tried, replicas = tf.unstack(total(counts))
        complete = tf.equal(kept, tried)
        overflows = tf.cast(tf.math.ceil(self.overflows.read_value()), tf.int64)
        largest = tf.identity(self.largest.read_value())
        # In the sums' own types; and not times 1 / kept, which is rounded. Of an empty window the sums are 0: as NaN
        # they would be counted as an overflow of every variable.
        grads = self._divided_sums(lambda values: tf.math.divide_no_nan(values, tf.cast(kept / replicas, values.dtype)))
        with tf.control_dependencies([*arithmetic.values_of(grads), overflows, largest, complete]):
            emptied = self.reset()
        drops_window = self._settings.overflow_drops == "window"
        return grads, LocalCheck(
            usable=complete if drops_window else kept > 0,
            complete=None if drops_window else complete,
            overflow_counts=overflows,
            max_abs=largest,
            emptied=emptied,
            already_checked=True,
        )

    def _divided_sums(self, divide: Callable[[tf.Tensor], tf.Tensor]) -> list[Gradient]:
        given = self._given_now()
        if not tf.executing_eagerly():
            self._left_out |= set(range(len(self.sums))) - given
        grads: list[Gradient] = []
        for index, (variable, dtype) in enumerate(zip(self.sums, self._dtypes, strict=True)):
            grad = None
            if index in given:
                values = variable.read_value()
                grad = arithmetic.rows_not_zero(values) if index in self._sparse else values
            grads.append(arithmetic.cast(arithmetic.map_values(divide, grad), dtype))
        return grads

    def _given_now(self) -> set[int]:
        """Return of which variables there was a gradient; a window that a checkpoint brought shows it by its sums."""
        if not self._given and tf.executing_eagerly() and self.tried.read_value() > 0:
            self._given |= {index for index, values in enumerate(self.sums) if tf.reduce_any(values.read_value() != 0)}
        return self._given

    def _is_on_replica(self) -> bool:
        return tf.distribute.get_strategy() is self._strategy and not tf.distribute.in_cross_replica_context()

    def _refuse_outside_of_replicas(self) -> None:
        active, own = tf.distribute.get_strategy(), self._strategy
        if active is not own and active.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"make the accumulator in the strategy's scope: it was made outside of that of this "
                f"{type(active).__name__}, and its replicas would share one window."
            )
        if own.num_replicas_in_sync > 1 and not self._is_on_replica():
            raise RuntimeError(
                f"the accumulator is of {type(own).__name__}'s replicas: call its methods on them, in strategy.run; "
                "is_full alone may be asked for outside."
            )

    def _refuse_if_empty(self) -> None:
        if tf.executing_eagerly() and self.tried.read_value() == 0:
            raise RuntimeError("the window is empty: add gradients first.")

    def _validate(self, grads: Gradients) -> None:
        if len(grads) != len(self.sums):
            raise ValueError(
                f"there are {len(grads)} gradients for {len(self.sums)} variables: pass one for each, None where the "
                "loss does not depend on it."
            )
        lists.refuse_all_none(grads)
        given = {index for index, grad in enumerate(grads) if grad is not None}
        lost = ", ".join(self._names[index] for index in sorted(given & self._left_out))
        if lost:
            raise ValueError(
                f"there was no gradient of {lost} when a function that ends the window was traced, which therefore "
                "leaves out what is added now: pass tf.zeros_like(variable) for a gradient there, or take all "
                "micro-batches by one function."
            )
        self._given = self._given_now() | given
        sparse = {index for index in given if arithmetic.is_sparse(grads[index])}
        self._sparse = (self._sparse - given) | sparse


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in arithmetic.HALF_TYPES else dtype


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
    if arithmetic.is_sparse(grad) and not tf.distribute.has_strategy():
        return variable.scatter_add(arithmetic.cast(grad, variable.dtype.base_dtype))
    # A replica's own variable knows no scatter_add.
    return variable.assign_add(tf.cast(arithmetic.densify(grad), variable.dtype.base_dtype))
