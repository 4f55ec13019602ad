"""Takes a training step again, on the same batch, while it overflows."""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.iteration import on_replica
from tfmp.core.managers import FixedLossScaleManager
from tfmp.core.step_properties import StepProperties
from tfmp.grad_scaler import GradScaler

Result = TypeVar("Result")


def replay(train_step: Callable[[], Result], scaler: StepProperties, max_replays: int) -> Result:
    """Take a training step, and again while it is skipped: at the lower scale its batch may not overflow.

    Nothing of the batch is lost, and nothing is applied twice: a skipped step moves nothing but the loss scale. A batch
    that overflows at every scale is given up in the end. It works eagerly, as a loop of Python, and in a `tf.function`,
    compiled by XLA too, as a loop on the device, for which the step is traced once.

    Each attempt is a step for the manager, and so a batch that holds NaN costs `max_replays` more back-offs. A manager
    that shrinks the scale after two overflows replays once at the same scale. And what the forward pass itself changes
    changes at every attempt: the averages of batch normalization, the state of random numbers, metrics.

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
        RuntimeError: It is called on a replica, or in a graph of TF1.

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


def _replay_eagerly(train_step: Callable[[], Result], scaler: StepProperties, times: int) -> Result:
    # Not `last_step_finite`: a call that ends no window takes no step.
    skipped = int(scaler.skipped_steps)
    result = train_step()
    for replayed in range(1, times + 1):
        if int(scaler.skipped_steps) < skipped + replayed:
            break
        result = train_step()
    return result


def _replay_on_device(train_step: Callable[[], Any], scaler: StepProperties, times: int) -> Any:  # noqa: ANN401 - a nest
    # One function for all calls, which is traced once.
    step = tf.function(train_step)

    def attempt(skipped: tf.Tensor) -> tuple[tf.Tensor, Any]:
        result = step()
        return scaler.skipped_steps > skipped, result

    def again(replayed: tf.Tensor, overflowed: tf.Tensor, carried: list[tf.Tensor]) -> tuple[Any, ...]:
        del overflowed, carried
        overflowed, result = attempt(skipped + tf.cast(replayed, tf.int64) + 1)
        return replayed + 1, overflowed, _tensors(result)

    skipped = tf.identity(scaler.skipped_steps)
    overflowed, result = attempt(skipped)
    carried = tf.while_loop(
        lambda replayed, overflowed, _: tf.logical_and(overflowed, replayed < times),
        again,
        [tf.constant(0), overflowed, _tensors(result)],
        # What an attempt writes, the next one reads.
        parallel_iterations=1,
    )[-1]
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
            "optimizer's last_step_finite is False."
        )
    is_enabled = not isinstance(scaler, GradScaler) or scaler.enabled
    if is_enabled and isinstance(scaler._loss_scale_manager, FixedLossScaleManager):
        raise ValueError(
            "the scale of a FixedLossScaleManager never falls: a batch that overflows once would do so at each replay. "
            "Use a tfmp.ExponentialUpdateLossScaleManager."
        )
