"""Repeats a training step on the same batch as long as its gradients overflow."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers import FixedLossScaleManager
from tfmp.core.step.properties import StepProperties
from tfmp.grad_scaler.scaler import GradScaler

Result = TypeVar("Result")


def replay(train_step: Callable[[], Result], scaler: StepProperties, *, max_replays: int) -> Result:
    """Take a training step, and repeat it on the same batch while it is skipped because of an overflow.

    A skipped step lowers the loss scale, so the same batch may not overflow the next time. In a `tf.function`, with or
    without `jit_compile`, the repetition is a loop on the device, for which `train_step` is traced once.

    Let several optimizers step together, by `GradScaler.step_all`, with one `update`: a step that was skipped only in
    part cannot be repeated and is an error.

    Every attempt counts as a step for the manager, and changes what the forward pass changes, such as the averages of
    batch normalization and the state of random number generators. It also counts the micro-batches of an accumulator.
    So leave out `micro_batches_per_epoch`, and end the last window of an epoch yourself, by `step` and `update`.

    Args:
        train_step: A function without arguments that takes one step on a batch: forward and backward pass, then `step`
            and `update`, or `apply_gradients`. With accumulation it processes a whole window. Under a `tf.distribute`
            strategy it calls `strategy.run`.
        scaler: The `tfmp.GradScaler` or `tfmp.LossScaleOptimizer` that `train_step` uses.
        max_replays: The largest number of repetitions; at least 1.

    Returns:
        The result of the last call of `train_step`; in a `tf.function`, as tensors.

    Raises:
        TypeError: `scaler` is not one of these two, or `max_replays` is not a number.
        ValueError: `max_replays` is not a whole number or is less than 1, or the manager's scale is fixed.
        RuntimeError: The call is on a replica or in a TF1 graph. Or an attempt was skipped only in part, by one of
            several optimizers or updates; variables that have changed stay changed. In a `tf.function` this error is an
            `InvalidArgumentError`; with `jit_compile=True` the repetition just ends, because XLA raises no errors.

    Examples:
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

    Source: the proposal of torch.amp, which calls this batch replay.
    """
    _validate(scaler)
    times = settings.count("max_replays", max_replays)
    # As a `tf.function` it is traced only once, although a loop on the device calls it at two places.
    step = train_step if tf.executing_eagerly() else tf.function(train_step)

    def attempt() -> tuple[_Moved, Result]:
        # `last_step_applied` would be about an earlier step if the call does not end a window.
        before = _counts(scaler)
        result = step()
        return _Moved(*tf.unstack(_counts(scaler) > before)), result

    moved, result = attempt()
    if not tf.executing_eagerly():
        return _repeat_on_device(attempt, moved, result, times)
    for _ in range(times):
        if not moved.is_skipped:
            break
        moved, result = attempt()
    _refuse_partial(moved)
    return result


class _Moved(NamedTuple):
    """Which counts a training step has moved; bool scalars."""

    applied: tf.Tensor
    #: Without spikes, which would be spikes again: the scale has not changed.
    skipped: tf.Tensor
    #: That of updates before which some steps were applied and others skipped.
    partial: tf.Tensor

    @property
    def is_skipped(self) -> tf.Tensor:
        return tf.logical_and(self.skipped, tf.logical_not(tf.logical_or(self.applied, self.partial)))


def _counts(scaler: StepProperties) -> tf.Tensor:
    partial = scaler._findings.read().partial_iterations if isinstance(scaler, GradScaler) else 0
    return tf.stack([scaler.applied_steps, scaler.skipped_steps - scaler.skipped_spikes, tf.cast(partial, tf.int64)])


def _repeat_on_device(
    attempt: Callable[[], tuple[_Moved, Result]], moved: _Moved, result: Result, times: int
) -> Result:
    def again(replayed: tf.Tensor, *_: Any) -> tuple[Any, ...]:  # noqa: ANN401
        moved, result = attempt()
        return replayed + 1, moved, _tensors(result)

    _, last, carried = tf.while_loop(
        lambda replayed, moved, _: tf.logical_and(moved.is_skipped, replayed < times),
        again,
        [tf.constant(0), moved, _tensors(result)],
        # Each attempt reads the variables that the attempt before it wrote.
        parallel_iterations=1,
    )
    _refuse_partial(last)
    rest = iter(carried)
    # A loop cannot carry None. Its places in the result are the same at every call, so they are restored here.
    return tf.nest.map_structure(lambda part: None if part is None else next(rest), result)


def _tensors(result: Any) -> list[Any]:  # noqa: ANN401 - a nest
    return [part for part in tf.nest.flatten(result) if part is not None]


def _refuse_partial(moved: _Moved) -> None:
    """Raise an error if a step was skipped only in part; on a device, add the ops that do so."""
    checks = [
        (
            moved.partial,
            "train_step was skipped only in part: one of its optimizers stepped and another did not, and the first "
            "would step twice if the batch was replayed. Let them step together, by scaler.step_all, which steps "
            "all of them or none.",
        ),
        (
            tf.logical_and(moved.applied, moved.skipped),
            "train_step was skipped only in part: it updated the scale several times, after a step that was applied "
            "and after one that was skipped. Let train_step take only one step with one update, and replay the steps "
            "one by one.",
        ),
    ]
    for is_wrong, message in checks:
        if not tf.executing_eagerly():
            tf.debugging.Assert(tf.logical_not(is_wrong), [message])
        elif is_wrong:
            raise RuntimeError(message)


def _validate(scaler: StepProperties) -> None:
    if not isinstance(scaler, StepProperties):
        raise TypeError(
            "scaler must be the tfmp.GradScaler or tfmp.LossScaleOptimizer that train_step steps with, got "
            f"{scaler!r} of type {type(scaler).__name__}."
        )
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "replay was called on a replica: call it outside of strategy.run, with a train_step that calls "
            "strategy.run."
        )
    if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
        raise RuntimeError(
            "replay was called in a TF1 graph, where session.run takes the steps: call session.run again while the "
            "optimizer's last_step_applied is False."
        )
    is_enabled = not isinstance(scaler, GradScaler) or scaler.enabled
    if is_enabled and isinstance(scaler.manager, FixedLossScaleManager):
        raise ValueError(
            "the scale of a FixedLossScaleManager never falls: a batch that overflows once would overflow at each "
            "replay. Use a tfmp.ExponentialUpdateLossScaleManager."
        )
