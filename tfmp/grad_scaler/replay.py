"""Takes a training step again, on the same batch, while it overflows."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers import FixedLossScaleManager
from tfmp.core.step.status import StepProperties
from tfmp.grad_scaler.call_order import on_replica
from tfmp.grad_scaler.scaler import GradScaler

Result = TypeVar("Result")


def replay(train_step: Callable[[], Result], scaler: StepProperties, max_replays: int) -> Result:
    """Take a training step, and again while it is skipped: at the lower scale its batch may not overflow.

    Nothing of the batch is lost, and nothing is applied twice: a skipped step moves nothing but the loss scale. A batch
    that overflows at every scale is given up in the end. It works eagerly, as a loop of Python, and in a `tf.function`,
    compiled by XLA too, as a loop on the device, for which the step is traced once.

    What was skipped only in part cannot be taken again as a whole, and is an error. So let several optimizers step
    together, by `step_all`, which applies all or none; and update the scale once in `train_step`.

    Each attempt is a step for the manager, and so a batch that holds NaN costs `max_replays` more back-offs. A manager
    that shrinks the scale after two overflows replays once at the same scale. And what the forward pass itself changes
    changes at every attempt: the averages of batch normalization, the state of random numbers, metrics. An accumulator
    counts the micro-batches of every attempt: leave its `micro_batches_per_epoch` out, and end the last window of an
    epoch yourself, by calling `step` and `update` with what it holds.

    Args:
        train_step: Takes one step on a batch that it holds: forward and backward pass, and `step` and `update` of a
            `tfmp.GradScaler`, or `apply_gradients` of a `tfmp.LossScaleOptimizer`. With accumulation: all micro-batches
            of a window. Under a `tf.distribute` strategy it calls `strategy.run`.
        scaler: The `tfmp.GradScaler` or `tfmp.LossScaleOptimizer` that it steps with.
        max_replays: How often the step may be taken again.

    Returns:
        What the last call of `train_step` returned; in a `tf.function`, as tensors.

    Raises:
        TypeError: `scaler` is neither, or `max_replays` is no number.
        ValueError: `max_replays` is not whole, or less than 1; or the manager's scale is fixed.
        RuntimeError: It is called on a replica, or in a graph of TF1. Or an attempt was skipped only in part: one of
            several optimizers stepped, or one of several updates was of a step that was applied. What was applied stays
            applied. In a `tf.function` that is an `InvalidArgumentError`; compiled by XLA, which checks nothing as it
            runs, the replay ends there without an error.

    Example:
        >>> import tfmp
        >>> w, optimizer = tf.Variable(0.0), tf.compat.v1.train.GradientDescentOptimizer(1.0)
        >>> scaler = tfmp.GradScaler(init_scale=2.0**16)
        >>> def train_step():
        ...     with tf.GradientTape() as tape:
        ...         half = tf.cast(w, tf.float16)
        ...         loss = scaler.scale(tf.cast(half, tf.float32) * 4)
        ...     scaler.step(optimizer, [(tape.gradient(loss, w), w)])
        ...     scaler.update()
        >>> tfmp.replay(train_step, scaler, max_replays=10)
        >>> float(w), float(scaler.loss_scale), int(scaler.skipped_steps)
        (-4.0, 8192.0, 3)

    Source: batch replay as in the proposal of torch.amp.
    """
    _validate(scaler)
    times = settings.count("max_replays", max_replays)
    if tf.executing_eagerly():
        return _replay_eagerly(train_step, scaler, times)
    return _replay_on_device(train_step, scaler, times)


class _Counts(NamedTuple):
    """What a scaler has counted; int64 scalars.

    Attributes:
        applied: Updates after steps that all were applied.
        skipped: The others.
        in_part: Of these, those after which some of several optimizers had stepped.
    """

    applied: tf.Tensor
    skipped: tf.Tensor
    in_part: tf.Tensor

    @classmethod
    def of(cls, scaler: StepProperties) -> "_Counts":
        in_part = scaler._pending.partial_iterations if isinstance(scaler, GradScaler) else tf.constant(0, tf.int64)
        return cls(tf.identity(scaler.applied_steps), tf.identity(scaler.skipped_steps), tf.identity(in_part))


class _Attempt(NamedTuple):
    """What became of an attempt; bool scalars.

    Attributes:
        skipped: Whether nothing was applied, and a step was skipped.
        optimizers_parted: Whether one optimizer stepped and another did not.
        updates_parted: Whether one update was of a step that was applied, and another of one that was not.
    """

    skipped: tf.Tensor
    optimizers_parted: tf.Tensor
    updates_parted: tf.Tensor

    @classmethod
    def between(cls, before: _Counts, after: _Counts) -> "_Attempt":
        skipped, applied = after.skipped > before.skipped, after.applied > before.applied
        optimizers_parted, updates_parted = after.in_part > before.in_part, tf.logical_and(skipped, applied)
        parted = tf.logical_or(optimizers_parted, updates_parted)
        return cls(tf.logical_and(skipped, tf.logical_not(parted)), optimizers_parted, updates_parted)

    def checks(self) -> list[tuple[tf.Tensor, str]]:
        """Return what must not be, with what to say then."""
        return [
            (
                self.optimizers_parted,
                "train_step was skipped only in part: one of its optimizers stepped, and would step again if the batch "
                "was replayed. Let them step together, by scaler.step_all, which applies all or none.",
            ),
            (
                self.updates_parted,
                "train_step was skipped only in part: it updated the scale several times, after a step that was "
                "applied and after one that was skipped. Take one step in it, with one update, and replay each.",
            ),
        ]


def _replay_eagerly(train_step: Callable[[], Result], scaler: StepProperties, times: int) -> Result:
    for _ in range(1 + times):
        # Not `last_step_applied`: a call that ends no window takes no step.
        before = _Counts.of(scaler)
        result = train_step()
        attempt = _Attempt.between(before, _Counts.of(scaler))
        for is_wrong, message in attempt.checks():
            if is_wrong:
                raise RuntimeError(message)
        if not attempt.skipped:
            break
    return result


def _replay_on_device(train_step: Callable[[], Any], scaler: StepProperties, times: int) -> Any:  # noqa: ANN401 - a nest
    # One function for all calls, which is traced once.
    step = tf.function(train_step)

    def attempt() -> tuple[_Attempt, Any]:
        before = _Counts.of(scaler)
        result = step()
        return _Attempt.between(before, _Counts.of(scaler)), result

    def again(replayed: tf.Tensor, last: _Attempt, carried: list[tf.Tensor]) -> tuple[Any, ...]:
        del last, carried
        last, result = attempt()
        return replayed + 1, last, _tensors(result)

    first, result = attempt()
    _, last, carried = tf.while_loop(
        lambda replayed, last, _: tf.logical_and(last.skipped, replayed < times),
        again,
        [tf.constant(0), first, _tensors(result)],
        # What an attempt writes, the next one reads.
        parallel_iterations=1,
    )
    for is_wrong, message in last.checks():
        tf.debugging.Assert(tf.logical_not(is_wrong), [message])
    rest = iter(carried)
    # A loop does not carry None, which is the same at every call.
    return tf.nest.map_structure(lambda part: None if part is None else next(rest), result)


def _tensors(result: Any) -> list[Any]:  # noqa: ANN401 - a nest
    return [part for part in tf.nest.flatten(result) if part is not None]


def _validate(scaler: StepProperties) -> None:
    if not isinstance(scaler, StepProperties):
        raise TypeError(
            "scaler must be the tfmp.GradScaler or tfmp.LossScaleOptimizer that train_step steps with, got "
            f"{scaler!r} of type {type(scaler).__name__}."
        )
    if on_replica():
        raise RuntimeError("replay was called on a replica: call it around strategy.run, which train_step calls.")
    if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
        raise RuntimeError(
            "replay was called in a graph of TF1, whose train op session.run takes: call session.run again while the "
            "optimizer's last_step_applied is False."
        )
    is_enabled = not isinstance(scaler, GradScaler) or scaler.enabled
    if is_enabled and isinstance(scaler.manager, FixedLossScaleManager):
        raise ValueError(
            "the scale of a FixedLossScaleManager never falls: a batch that overflows once would do so at each replay. "
            "Use a tfmp.ExponentialUpdateLossScaleManager."
        )
