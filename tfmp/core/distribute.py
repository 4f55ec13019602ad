"""What it takes for many replicas to act as one: share gradients, agree on a flag, act on it, act once."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tfmp.core import numerics
from tfmp.core.conditionals import call_either
from tfmp.core.horovods import running_horovod
from tfmp.types import ApplyGradients, Gradient, Gradients

_STRATEGIES_OF_WORKERS = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy,
)

#: Strategies whose replicas were tested to agree; every other is refused by name.
_SUPPORTED_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
    *_STRATEGIES_OF_WORKERS,
)

_Strategy: TypeAlias = tf.distribute.Strategy | tf.compat.v1.distribute.Strategy


class Distribution(Protocol):
    """How the replicas of one step act together. Every method is called on each replica."""

    @property
    def addends(self) -> int:
        """How many replicas' gradients an optimizer sums when it applies them, after they were checked."""

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean of the gradients over the replicas, for an optimizer that nobody makes do so.

        Args:
            grads: The replica's gradients of a scaled loss.
            names: The names of their variables, for errors.
            dtype: The type that they travel in; by default their own.

        Returns:
            The means, the same on each replica; the gradients themselves where the optimizer sums them.
        """

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return whether the flag is true on every replica, the same answer on each.

        Args:
            flag: A boolean scalar.
            grads: The replica's gradients; all replicas must have the same.
            names: The names of their variables, for errors.
        """

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest of the replicas' values, the same on each; NaN is not to be among them.

        Args:
            values: The replica's values, of any shape: one comes out for each of them.
            name: What they are, a different name for each use in a step: Horovod tells tensors apart by that.
        """

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of the replicas' values, the same on each.

        Args:
            values: The replica's values, of any shape: one comes out for each of them.
            name: What they are, as for `maximum`.
        """

    def call_either(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> tf.Operation:
        """Call one of two functions on every replica, the same on each.

        Args:
            flag: A boolean scalar on which all replicas agree.
            grads: The replica's gradients, which are what may differ between replicas.
            if_true: Called with them where the flag is true; may reduce across replicas, or call `once`.
            if_false: Called with them where it is false; the same holds.

        Returns:
            The op that does so; None in eager mode.
        """

    def once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        """Call a function that changes what all replicas share, once for all of them.

        Args:
            function: Changes variables; must not need anything that differs between replicas.

        Returns:
            The op that does so; None in eager mode.
        """


def current_distribution(is_distributed: bool) -> Distribution:
    """Return the distribution that the step being built is part of.

    Args:
        is_distributed: Whether the user says that more than one device takes part.

    Returns:
        The distribution of the active `tf.distribute` strategy; or of Horovod; or of a single process.

    Raises:
        ValueError: The user says that there are several devices and nothing here knows of them.
        NotImplementedError: The active strategy is not one of those supported; or Horovod distributes too.
        RuntimeError: A strategy is active, and the call is not made on its replicas.

    Example:
        >>> current_distribution(is_distributed=False)
        SingleProcess()
    """
    horovod = running_horovod()
    if not tf.distribute.has_strategy():
        if not is_distributed:
            return SingleProcess()
        if horovod is None:
            raise ValueError(
                "is_distributed=True, and nothing distributes: call hvd.init() of horovod.tensorflow before this, or "
                "build the step under a tf.distribute strategy (Estimator: RunConfig(train_distribute=...)), or leave "
                "is_distributed=False for one device."
            )
        return Horovod(horovod) if horovod.size() > 1 else SingleProcess()
    strategy = tf.distribute.get_strategy()
    if horovod is not None and horovod.size() > 1:
        raise NotImplementedError(
            f"Horovod runs {horovod.size()} processes, and {type(strategy).__name__} is active in this one: tfmp does "
            "not join the two. Distribute by one of them."
        )
    if not isinstance(strategy, _SUPPORTED_STRATEGIES):
        raise NotImplementedError(
            f"tfmp does not support {type(strategy).__name__}: use MirroredStrategy, MultiWorkerMirroredStrategy or "
            "OneDeviceStrategy."
        )
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            f"the step was built in the cross-replica context of {type(strategy).__name__}: call apply_gradients "
            "on the replicas, inside strategy.run or Estimator's model_fn."
        )
    return MirroredWorkers() if isinstance(strategy, _STRATEGIES_OF_WORKERS) else Mirrored()


class SingleProcess:
    """One replica, which always agrees with itself."""

    addends = 1

    def __repr__(self) -> str:
        return "SingleProcess()"

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the gradients."""
        del names, dtype
        return list(grads)

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return the flag."""
        del grads, names
        return flag

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the values."""
        del name
        return values

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the values."""
        del name
        return values

    def call_either(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> tf.Operation:
        """Call one of the functions."""
        return call_either(flag, grads, if_true, if_false)

    def once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        """Call the function."""
        return function()


class Mirrored:
    """The replicas of a `tf.distribute` strategy that keeps a copy of every variable on each of them.

    The conditional must stand in the cross-replica context: optimizers meet there to sum gradients, and a branch
    that only some replicas' threads built would wait for the others for ever.
    """

    def __repr__(self) -> str:
        return "Mirrored()"

    @property
    def addends(self) -> int:
        """The number of replicas, of all workers."""
        return _replica_context().num_replicas_in_sync

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the gradients: optimizers sum them over the replicas when they apply them."""
        del names
        if dtype is not None:
            raise NotImplementedError(
                f"aggregation_dtype={dtype.name!r} is for Horovod: under a tf.distribute strategy the wrapped "
                "optimizer sums the gradients, in their own type."
            )
        return list(grads)

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return whether the flag is true on every replica; those of one process cannot differ in their gradients."""
        del grads, names
        return tf.equal(self.total(tf.cast(tf.logical_not(flag), tf.float32), "steps_not_finite"), 0)

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest of the replicas' values."""
        context = _replica_context()
        own = _in_slot(values, context.replica_id_in_sync_group, context.num_replicas_in_sync)
        return tf.reduce_max(self.total(own, name), axis=0)

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of the replicas' values."""
        del name
        # Else all_reduce (TensorFlow 2.15 to 2.21, in graphs) looks for the variables that a gradient would depend on.
        return _replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(values))

    def call_either(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> tf.Operation:
        """Call one of the functions on each replica; the conditional stands in the cross-replica context."""

        def on_all(strategy: _Strategy, flags: tf.Tensor, grads: Gradients) -> tf.Operation:
            def run(function: ApplyGradients) -> tf.Operation:
                return tf.group(strategy.experimental_local_results(strategy.run(function, args=(grads,))))

            # A graph orders nothing by itself: what each replica did before its flag comes before what is called.
            flags = strategy.experimental_local_results(flags)
            with tf.control_dependencies(flags):
                first = tf.identity(flags[0])
            return call_either(first, [], lambda _: run(if_true), lambda _: run(if_false))

        return _replica_context().merge_call(on_all, args=(flag, list(grads)))

    def once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        """Call the function in the cross-replica context."""
        return _replica_context().merge_call(lambda strategy: function())


class MirroredWorkers(Mirrored):
    """Such replicas in several processes, each of which builds a step of its own.

    TensorFlow sums the first gradient of one with the first of the others, whichever variables they belong to.
    """

    def __repr__(self) -> str:
        return "MirroredWorkers()"

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return whether the flag is true on every replica; stop where one has a gradient that another lacks."""
        ones = tf.concat([[tf.logical_not(flag)], tf.reshape(numerics.forms(grads), [-1])], axis=0)
        counts = self.total(tf.cast(ones, tf.float32), "forms_of_gradients")
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.control_dependencies([_assert_alike(tf.reshape(counts[1:], [-1, 2]), replicas, names)]):
            return tf.equal(counts[0], 0)


class Horovod(SingleProcess):
    """The processes that Horovod connects, each of which acts on variables of its own.

    Args:
        horovod: The module `horovod.tensorflow`, initialized.
    """

    def __init__(self, horovod: ModuleType) -> None:
        self._horovod = horovod

    def __repr__(self) -> str:
        return "Horovod()"

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean over the processes."""
        with tf.control_dependencies([self._assert_same_forms(grads, names)]):
            return [self._mean(grad, f"gradient_{index}", dtype) for index, grad in enumerate(grads)]

    def _mean(self, grad: Gradient, name: str, dtype: tf.DType | None) -> Gradient:
        def part(values: tf.Tensor) -> tf.Tensor:
            # Divided before the cast and the sum: neither overflows unless the mean comes near to it.
            return tf.cast(
                values / _of_each_step(tf.constant(self._horovod.size(), values.dtype)), dtype or values.dtype
            )

        def summed(values: tf.Tensor) -> tf.Tensor:
            return tf.cast(self._horovod.allreduce(part(values), op=self._horovod.Sum, name=name), values.dtype)

        def rows(values: tf.Tensor) -> tf.Tensor:
            return tf.cast(self._horovod.allgather(part(values), name=f"{name}_values"), values.dtype)

        def indices(values: tf.Tensor) -> tf.Tensor:
            return self._horovod.allgather(_of_each_step(values), name=f"{name}_indices")

        return numerics.map_parts(summed, rows, indices, grad)

    def _assert_same_forms(self, grads: Gradients, names: Sequence[str]) -> tf.Operation:
        """Stop every process where one has a gradient that another lacks, which would wait for it for ever.

        Nothing of a step is needed to know, so in a graph this is done by the time that there are gradients.
        """
        counts = self.total(tf.cast(numerics.forms(grads), tf.float32), "forms_of_gradients")
        return _assert_alike(counts, self._horovod.size(), names)

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return whether the flag is true in every process; `mean` has compared the gradients."""
        del grads, names
        return tf.equal(self.total(tf.cast(tf.logical_not(flag), tf.float32), "steps_not_finite"), 0)

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest of the processes' values."""
        return tf.reduce_max(self.total(_in_slot(values, self._horovod.rank(), self._horovod.size()), name), axis=0)

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of the processes' values."""
        return self._horovod.allreduce(_of_each_step(values), op=self._horovod.Sum, name=name)


def _in_slot(values: tf.Tensor, replica: int | tf.Tensor, replicas: int) -> tf.Tensor:
    """Return the values as one slot of many that are 0: the sum over the replicas then holds those of each.

    Sums are what every strategy knows; a maximum is not.
    """
    is_own = tf.reshape(tf.equal(tf.range(replicas), replica), [replicas] + [1] * values.shape.rank)
    return tf.where(is_own, values, tf.zeros([], values.dtype))


def _assert_alike(counts: tf.Tensor, replicas: int, names: Sequence[str]) -> tf.Operation:
    """Stop unless what `numerics.forms` tells holds on no replica or on all; `counts` says on how many."""
    alike = tf.reduce_all(tf.logical_or(tf.equal(counts, 0), tf.equal(counts, replicas)), axis=1)
    differing = tf.boolean_mask(list(names), tf.logical_not(alike))
    return tf.debugging.Assert(
        tf.reduce_all(alike), ["the workers differ in whether the gradients of these are None, or sparse:", differing]
    )


def _of_each_step(value: tf.Tensor) -> tf.Tensor:
    """Return a number, or a few, as no constant, even where they are always the same.

    Horovod's ops (0.28.1) do not say that they are stateful. That of a constant runs while TensorFlow optimizes a
    graph, anew for each set of fetches: a process that fetches a summary would wait for ever for those that do not.
    """
    # Not times 1: TensorFlow knows what 0 times anything is.
    return value + tf.cast(tf.timestamp() < 0, value.dtype)


def _replica_context() -> Any:  # noqa: ANN401 - TensorFlow ships no types
    return tf.distribute.get_replica_context()
