"""Adds up the gradients of several micro-batches, so that their mean can be applied like that of one batch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.dtypes import HALF_TYPES
from tfmp.core.gradients import arithmetic
from tfmp.core.overflow.detectors import KINDS, OverflowDetector, validated_detector
from tfmp.core.overflow.found import Checked, Found, GradientCheck
from tfmp.core.storage.graph_variables import SAVED_COLLECTIONS
from tfmp.core.tracing import conditional_update, without_autograph
from tfmp.types import AddBuffer, Done, Gradient, Gradients


class AccumulationSettings(NamedTuple):
    """The settings of a window, checked by `accumulation_settings`; `GradientAccumulator` says what they mean."""

    accumulation_steps: int
    overflow_drops: str
    micro_batches_per_epoch: int | None


def accumulation_settings(
    accumulation_steps: int, overflow_drops: str, micro_batches_per_epoch: int | None
) -> AccumulationSettings:
    """Check the settings that a user passed, and return them."""
    if overflow_drops not in ("window", "micro_batch"):
        raise ValueError(f'overflow_drops must be "window" or "micro_batch", got {overflow_drops!r}.')
    if micro_batches_per_epoch is not None:
        micro_batches_per_epoch = settings.count("micro_batches_per_epoch", micro_batches_per_epoch)
    steps = settings.count("accumulation_steps", accumulation_steps)
    return AccumulationSettings(steps, overflow_drops, micro_batches_per_epoch)


class GradientAccumulator(tf.Module):
    """Adds up the gradients of several micro-batches, so that their mean can be applied like that of one batch.

    The micro-batches between two steps of the optimizer are called a window. Call `add` for each micro-batch. When
    `is_full` is True, take a step with `mean()` and call `reset()`. With a `tfmp.GradScaler`, pass the accumulator to
    `GradScaler.unscale` instead: it returns the mean, empties the window, and applies `overflow_drops`.

    The rule, for the unscaled gradients `g` of each micro-batch, in float32 (float64 if the variable is in float64):

        add      tried += 1
                 if g is finite:  sum += g  and  kept += 1
        mean     sum / kept
        usable   kept == tried                  with overflow_drops="window"
                 kept > 0                       with overflow_drops="micro_batch"

    `GradScaler.step` skips the step if the window is not usable. Each replica of a `tf.distribute` strategy, and each
    process of Horovod, has sums of its own, until `GradScaler.unscale` ends the window: `kept` and `tried` in the rule
    are then the totals of all replicas.

    The mean for a variable is None until a micro-batch has a gradient for it; after that, None counts as zeros. In a
    `tf.function` this is decided in the trace, and adding the first gradient for a variable later is an error. After a
    checkpoint was restored, eager code assumes that the variables whose sum is not 0 had a gradient. If the last
    gradient was an `IndexedSlices`, the mean is one too, of the rows whose sum is not 0; in XLA, of all rows.

    Args:
        variables: The variables to train, of TensorFlow or Keras. Under a `tf.distribute` strategy, make the
            accumulator in the strategy's scope, and call its methods on the replicas; `is_full` can be read outside.
        accumulation_steps: The number of micro-batches in a full window.
        overflow_drops: What an overflow drops: the whole `"window"`, or that `"micro_batch"`.
        micro_batches_per_epoch: The number of micro-batches, in an epoch or in the whole training, after which a window
            ends even if it is not full; counting then starts anew. By default only full windows end.
        overflow_detector: Decides which gradients overflowed; by default a `tfmp.NonFiniteDetector`.

    Attributes:
        sums: The sums of the gradients of the micro-batches that were kept, one for each variable.
        kept: The number of micro-batches in the sums; float64.
        tried: The number of micro-batches in the window, including those that overflowed; float64.
        tried_in_epoch: The same, of the epoch if there are `micro_batches_per_epoch`; float64.
        largest: The largest gradient magnitude among the micro-batches that were kept, if it is needed; float32.
        overflows: The counts of `OverflowDetector.counts` for the micro-batches that overflowed; float64.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: There are no variables, or a setting is out of range.
        RuntimeError: A method is called outside of the replicas of the strategy in whose scope the accumulator was
            made, or of a strategy outside of whose scope it was made.

    Examples:
        >>> import tfmp
        >>> w = tf.Variable([1.0, 2.0])
        >>> accumulator = tfmp.GradientAccumulator([w], accumulation_steps=2)
        >>> for grad in [[2.0, 4.0], [4.0, 8.0]]:
        ...     accumulator.add([tf.constant(grad)])
        >>> bool(accumulator.is_full), accumulator.mean()[0].numpy().tolist()
        (True, [3.0, 6.0])

    Source: the examples of torch.amp for gradient accumulation; and MMCV, for windows that end early.
    """

    def __init__(
        self,
        variables: Iterable[tf.Variable],
        accumulation_steps: int,
        *,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        overflow_detector: OverflowDetector | None = None,
    ) -> None:
        super().__init__()
        given = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        self._build(variables, given, overflow_detector, _add_buffer, keeps_float32=False)

    def _build(
        self,
        variables: Iterable[tf.Variable],
        given: AccumulationSettings,
        overflow_detector: OverflowDetector | None,
        add: AddBuffer,
        *,
        keeps_float32: bool,
    ) -> None:
        self._settings = given
        variables = lists.variables("variables", variables)
        if not variables:
            raise ValueError("variables is empty: pass the variables to train.")
        self._detector = validated_detector(overflow_detector)
        dtypes = [tf.as_dtype(variable.dtype).base_dtype for variable in variables]
        sum_dtypes = [tf.float32 if dtype in HALF_TYPES else dtype for dtype in dtypes]
        self._dtypes = sum_dtypes if keeps_float32 else dtypes
        self._strategy = tf.distribute.get_strategy()
        self._names = [variable.name for variable in variables]
        # Indices of variables: with a gradient, with a sparse last one, with None in a traced end of a window.
        self._have_grad: set[int] = set()
        self._sparse: set[int] = set()
        self._none_when_traced: set[int] = set()
        with tf.init_scope():
            self.sums = [
                add(f"sum_{index}", variable.shape.as_list(), dtype)
                for index, (variable, dtype) in enumerate(zip(variables, sum_dtypes, strict=True))
            ]
            # A replica restores an equal part of the saved sum, which may not be whole; float32 counts only to 2**24.
            self.kept = add("kept", [], tf.float64)
            self.tried = add("tried", [], tf.float64)
            self.tried_in_epoch = add("tried_in_epoch", [], tf.float64)
            # With several replicas, a restored value is the mean of the saved ones, so it is at most the largest.
            self.largest = add("largest", [], tf.float32)
            self.overflows = add("overflows", [len(variables), len(KINDS)], tf.float64)

    @property
    def is_full(self) -> tf.Tensor:
        """True if the window has ended, because it is full or because the epoch is over; a boolean scalar.

        Examples:
            >>> accumulator = GradientAccumulator([tf.Variable(0.0)], 2, micro_batches_per_epoch=1)
            >>> accumulator.add([tf.constant(1.0)])
            >>> bool(accumulator.is_full)
            True
        """
        # Outside of the replicas, a variable reads as the sum of the replicas' values, so divide by their number.
        num_added = 1 if self._is_on_replica() else self._strategy.num_replicas_in_sync
        full = self.tried.read_value() / num_added >= self._settings.accumulation_steps
        per_epoch = self._settings.micro_batches_per_epoch
        if per_epoch is None:
            return full
        return tf.logical_or(full, self.tried_in_epoch.read_value() / num_added >= per_epoch)

    @without_autograph
    def add(self, grads: Iterable[Gradient], loss_scale: tf.Tensor | float = 1.0) -> tf.Operation:
        """Divide the gradients of a micro-batch by the loss scale, and add them to the sums unless they overflowed.

        Args:
            grads: This replica's gradients, one for each variable; None adds nothing.
            loss_scale: The number by which the loss was multiplied, such as `GradScaler.loss_scale`: a scalar tensor or
                a number.

        Returns:
            The op that adds the gradients; None in eager mode. In a TF1 graph, `mean` and `is_full` need a control
            dependency on this op.

        Raises:
            ValueError: The number of gradients is wrong, every gradient is None, or the scale is not finite or not
                greater than 0.
            TypeError: `grads` is not a list of gradients, a gradient is complex, or the scale is not a number.

        Examples:
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
        return self.add_unscaled(arithmetic.unscale(lists.of_tensors(lists.gradients(grads)), loss_scale), loss_scale)

    @without_autograph
    def add_unscaled(
        self, grads: Iterable[Gradient], loss_scale: tf.Tensor, *, keeps_max_abs: bool = True
    ) -> tf.Operation:
        """Add gradients that are already unscaled; otherwise like `add`.

        Args:
            grads: This replica's gradients, one for each variable; None adds nothing.
            loss_scale: The number by which the loss was multiplied, for the overflow detector.
            keeps_max_abs: True to store the largest magnitude in `largest`.
        """
        grads = lists.of_tensors(lists.gradients(grads))
        self._refuse_outside_of_replicas()
        lists.refuse_other_number(grads, self.sums)
        lists.refuse_all_none(grads)
        self._note_presence(grads)
        check = GradientCheck(self._detector, loss_scale, needs_max_abs=keeps_max_abs)
        found = check.find(grads)

        def keep(grads: Gradients) -> tf.Operation:
            kept = [*map(_add_to, self.sums, grads), self.kept.assign_add(1.0)]
            if found.max_abs is not None:
                kept.append(self.largest.assign(tf.reduce_max([self.largest.read_value(), found.max_abs])))
            return tf.group(*kept)

        def drop(grads: Gradients) -> tf.Operation:
            return tf.group(self.overflows.assign_add(tf.cast(check.counts(grads), tf.float64)))

        # Last: in a graph, a run that fails before it has gradients, as at the end of the input, must not count.
        with tf.control_dependencies([conditional_update(found.usable, grads, keep, drop)]):
            return tf.group(self.tried.assign_add(1.0), self.tried_in_epoch.assign_add(1.0))

    def _note_presence(self, grads: Gradients) -> None:
        """Remember which variables these gradients are for; refuse one that a traced end of a window leaves out."""
        present = {index for index, grad in enumerate(grads) if grad is not None}
        ignored = ", ".join(self._names[index] for index in sorted(present & self._none_when_traced))
        if ignored:
            raise ValueError(
                f"there was no gradient for {ignored} when the function that ends the window was traced, so that "
                "function would ignore the gradient that is added now: pass tf.zeros_like(variable) as the gradient "
                "before the function is traced, or add all micro-batches in one function."
            )
        self._recall_restored()
        self._have_grad |= present
        self._sparse -= present
        self._sparse |= {index for index in present if isinstance(grads[index], tf.IndexedSlices)}

    def _recall_restored(self) -> None:
        # After a checkpoint was restored, only the sums can show which variables had gradients.
        if not self._have_grad and tf.executing_eagerly() and self.tried.read_value() > 0:
            not_zero = [bool(tf.reduce_any(values.read_value() != 0)) for values in self.sums]
            self._have_grad = {index for index, restored in enumerate(not_zero) if restored}

    @without_autograph
    def mean(self) -> list[Gradient]:
        """Return the mean of the micro-batches that this replica has kept: the sums divided by their number.

        Returns:
            One gradient for each variable, in the variable's dtype. It is NaN if every micro-batch overflowed, and None
            if no micro-batch had a gradient for the variable.

        Raises:
            RuntimeError: The window is empty; this is only checked in eager code.
        """
        self._refuse_outside_of_replicas()
        self._refuse_if_empty()
        kept = self.kept.read_value()
        return self._divided_sums(lambda values: values / tf.cast(kept, values.dtype))

    @without_autograph
    def reset(self) -> tf.Operation:
        """Empty the window, so that the next micro-batch starts a new one; return the op, None in eager mode."""
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

    def drain(self, total: Callable[[tf.Tensor], tf.Tensor]) -> tuple[list[Gradient], Checked, Done]:
        """Return this replica's part of the window's mean, what is known of it, and the op that empties the window.

        The gradients are this replica's sums, divided by the average of `kept`: their mean over the replicas is the
        mean of all micro-batches that were kept. `total` sums a tensor over the replicas.
        """
        self._refuse_outside_of_replicas()
        self._refuse_if_empty()
        counts = tf.stack([self.kept.read_value(), self.tried.read_value(), tf.ones([], tf.float64)])
        kept, tried, replicas = tf.unstack(total(counts))
        complete = tf.equal(kept, tried)
        # Restored counts may not be whole; rounding them up loses no overflow.
        overflows = tf.cast(tf.math.ceil(self.overflows.read_value()), tf.int64)
        largest = tf.identity(self.largest.read_value())
        # Not times 1 / kept, which is rounded. If none was kept, 0: NaN would count as an overflow of every variable.
        grads = self._divided_sums(lambda values: tf.math.divide_no_nan(values, tf.cast(kept / replicas, values.dtype)))
        with tf.control_dependencies([*arithmetic.values_of(grads), overflows, largest, complete]):
            emptied = self.reset()
        drops_window = self._settings.overflow_drops == "window"
        found = Found(complete if drops_window else kept > 0, largest, None if drops_window else complete)
        return grads, Checked(found, of_window=True, window_counts=overflows), emptied

    def _divided_sums(self, divide: Callable[[tf.Tensor], tf.Tensor]) -> list[Gradient]:
        self._recall_restored()
        if not tf.executing_eagerly():
            self._none_when_traced |= set(range(len(self.sums))) - self._have_grad
        grads: list[Gradient] = []
        for index, (variable, dtype) in enumerate(zip(self.sums, self._dtypes, strict=True)):
            grad = None
            if index in self._have_grad:
                values = variable.read_value()
                grad = arithmetic.rows_not_zero(values) if index in self._sparse else values
            grads.append(arithmetic.cast(arithmetic.map_values(divide, grad), dtype))
        return grads

    def _is_on_replica(self) -> bool:
        return tf.distribute.get_strategy() is self._strategy and not tf.distribute.in_cross_replica_context()

    def _refuse_outside_of_replicas(self) -> None:
        active, own = tf.distribute.get_strategy(), self._strategy
        if active is not own and active.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"make the accumulator in the strategy's scope: it was made outside of the scope of this "
                f"{type(active).__name__}, so that all replicas would share one window."
            )
        if own.num_replicas_in_sync > 1 and not self._is_on_replica():
            raise RuntimeError(
                f"the accumulator belongs to the replicas of {type(own).__name__}: call its methods on the replicas, "
                "inside strategy.run; only is_full can be read outside."
            )

    def _refuse_if_empty(self) -> None:
        if tf.executing_eagerly() and self.tried.read_value() == 0:
            raise RuntimeError("the window is empty: add gradients first.")


def accumulator_of_optimizer(
    variables: Iterable[tf.Variable],
    given: AccumulationSettings,
    overflow_detector: OverflowDetector | None,
    add_buffer: AddBuffer | None = None,
    *,
    keeps_float32: bool = False,
) -> GradientAccumulator:
    """Return the accumulator of an optimizer, which may make its variables, by `add_buffer`.

    `keeps_float32` is for an optimizer that updates float32 copies of half-precision variables: the mean stays float32.
    """
    made = GradientAccumulator.__new__(GradientAccumulator)
    tf.Module.__init__(made)
    made._build(variables, given, overflow_detector, add_buffer or _add_buffer, keeps_float32=keeps_float32)
    return made


def _add_buffer(name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    # In a graph, `tf.Variable` would add each replica's part to the global variables, to be saved beside the sum.
    return tf.compat.v1.Variable(
        tf.zeros(shape, dtype),
        name=name,
        use_resource=True,
        collections=SAVED_COLLECTIONS,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _add_to(variable: tf.Variable, grad: Gradient) -> Any:  # noqa: ANN401 - an op, or what a variable returns
    if grad is None:
        return tf.no_op()
    if isinstance(grad, tf.IndexedSlices) and not tf.distribute.has_strategy():
        return variable.scatter_add(arithmetic.cast(grad, variable.dtype.base_dtype))
    # The variables that are separate on each replica do not support scatter_add.
    return variable.assign_add(tf.cast(arithmetic.densify(grad), variable.dtype.base_dtype))
