"""What it takes for many replicas to act as one: agree on a flag, act on it, act once."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tfmp.types import ApplyGradients, Gradients

#: Strategies whose replicas were tested to agree; every other is refused by name.
_SUPPORTED_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
)

_Strategy: TypeAlias = tf.distribute.Strategy | tf.compat.v1.distribute.Strategy


class Distribution(Protocol):
    """How the replicas of one step act together. Every method is called on each replica."""

    def all_true(self, flag: tf.Tensor) -> tf.Tensor:
        """Return whether the flag is true on every replica, the same answer on each.

        Args:
            flag: A boolean scalar.
        """

    def apply_if(self, flag: tf.Tensor, apply_fn: ApplyGradients, grads: Gradients) -> tf.Operation:
        """Call `apply_fn` with the replica's own gradients if the flag is true.

        Args:
            flag: A boolean scalar on which all replicas agree.
            apply_fn: Applies gradients; may itself reduce them across replicas.
            grads: The replica's gradients.

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
        The distribution of the active `tf.distribute` strategy, or of a single process.

    Raises:
        ValueError: The user says that there are several devices and nothing here knows of them.
        NotImplementedError: The active strategy is not one of those supported.
        RuntimeError: A strategy is active, and the call is not made on its replicas.

    Example:
        >>> current_distribution(is_distributed=False)
        SingleProcess()
    """
    if not tf.distribute.has_strategy():
        if is_distributed:
            raise ValueError(
                "is_distributed=True, and no tf.distribute strategy is active: build the step under a strategy "
                "(Estimator: RunConfig(train_distribute=...)), or leave is_distributed=False for one device."
            )
        return SingleProcess()
    strategy = tf.distribute.get_strategy()
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
    return Mirrored()


class SingleProcess:
    """One replica, which always agrees with itself."""

    def __repr__(self) -> str:
        return "SingleProcess()"

    def all_true(self, flag: tf.Tensor) -> tf.Tensor:
        """Return the flag."""
        return flag

    def apply_if(self, flag: tf.Tensor, apply_fn: ApplyGradients, grads: Gradients) -> tf.Operation:
        """Call `apply_fn` if the flag is true."""
        return _run_if(flag, lambda: apply_fn(grads))

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

    def all_true(self, flag: tf.Tensor) -> tf.Tensor:
        """Return whether the flag is true on every replica."""
        false_count = tf.cast(tf.logical_not(flag), tf.float32)
        return tf.equal(_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, false_count), 0)

    def apply_if(self, flag: tf.Tensor, apply_fn: ApplyGradients, grads: Gradients) -> tf.Operation:
        """Call `apply_fn` on each replica if the flag is true."""

        def apply_on_all(strategy: _Strategy, flags: tf.Tensor, grads: Gradients) -> tf.Operation:
            def run() -> tf.Operation:
                return tf.group(strategy.experimental_local_results(strategy.run(apply_fn, args=(grads,))))

            return _run_if(strategy.experimental_local_results(flags)[0], run)

        return _replica_context().merge_call(apply_on_all, args=(flag, list(grads)))

    def once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        """Call the function in the cross-replica context."""
        return _replica_context().merge_call(lambda strategy: function())


def _run_if(flag: tf.Tensor, function: Callable[[], tf.Operation]) -> tf.Operation:
    def run() -> tf.Tensor:
        with tf.control_dependencies([function()]):
            return tf.constant(True)

    return tf.group(tf.cond(flag, run, lambda: tf.constant(False)))


def _replica_context() -> Any:  # noqa: ANN401 - TensorFlow ships no types
    return tf.distribute.get_replica_context()
