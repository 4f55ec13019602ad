"""Clips gradients so that an overflow stays visible."""

from collections.abc import Iterable
from typing import TypeAlias

import tensorflow as tf

from tfmp.core import lists, numerics, reductions, settings
from tfmp.types import Gradient

_Number: TypeAlias = float | tf.Tensor


def clip_by_value(grads: Iterable[Gradient], clip_value_min: _Number, clip_value_max: _Number) -> list[Gradient]:
    """Clip the finite values of gradients to a range.

    `tf.clip_by_value` makes an infinity the end of the range, and a step that overflowed is then applied. Here
    infinities and NaN stay, so it is skipped.

    Args:
        grads: Unscaled gradients of one replica, a list; None stays None. Of an `IndexedSlices` each row is clipped by
            itself, as TensorFlow does.
        clip_value_min: The lowest value; a number or a scalar tensor.
        clip_value_max: The highest.

    Returns:
        The clipped gradients, in their types and forms.

    Raises:
        TypeError: `grads` is no list of gradients, or a bound no number.
        ValueError: There is no gradient; or a bound is not finite, or they are not in order.

    Example:
        >>> clip_by_value([tf.constant([3.0, -0.5, float("inf")]), None], -1, 1)[0].numpy().tolist()
        [1.0, -0.5, inf]
    """
    grads = _validated(grads)
    lowest, highest = _bound("clip_value_min", clip_value_min), _bound("clip_value_max", clip_value_max)
    if settings.is_number(clip_value_min) and settings.is_number(clip_value_max) and clip_value_min > clip_value_max:
        raise ValueError(
            f"clip_value_min must not be greater than clip_value_max, got {clip_value_min!r} and {clip_value_max!r}."
        )

    def clip(values: tf.Tensor) -> tf.Tensor:
        clipped = tf.clip_by_value(values, tf.cast(lowest, values.dtype), tf.cast(highest, values.dtype))
        return tf.where(tf.math.is_finite(values), clipped, values)

    return [numerics.map_values(clip, grad) for grad in grads]


def clip_by_norm(grads: Iterable[Gradient], clip_norm: _Number) -> list[Gradient]:
    """Clip each gradient to a norm of its own.

    The rule, for each gradient `g`:

        g * clip_norm / norm(g)    if norm(g) is finite, and greater than clip_norm
        g                          otherwise

    `tf.clip_by_norm` makes an infinity NaN and the values beside it 0, and a gradient whose squares overflow 0.

    Args:
        grads: Unscaled gradients of one replica, a list; None stays None. The norm of an `IndexedSlices` is that of its
            rows, as TensorFlow has it.
        clip_norm: The highest norm; a number or a scalar tensor.

    Returns:
        The clipped gradients, in their types and forms.

    Raises:
        TypeError: `grads` is no list of gradients, or the norm no number.
        ValueError: There is no gradient, or the norm is not finite and above 0.

    Example:
        >>> clipped = clip_by_norm([tf.constant([3.0, 4.0]), tf.constant([1.0, float("inf")])], 2.5)
        >>> [grad.numpy().tolist() for grad in clipped]
        [[1.5, 2.0], [1.0, inf]]
    """
    grads = _validated(grads)
    factors = tf.unstack(_factors(reductions.norms(grads), clip_norm), num=len(grads))
    return [numerics.shrink(grad, factor) for grad, factor in zip(grads, factors, strict=True)]


def clip_by_global_norm(grads: Iterable[Gradient], clip_norm: _Number) -> tuple[list[Gradient], tf.Tensor]:
    """Clip gradients to a norm of all together, which keeps the direction of the step.

    The rule of `clip_by_norm`, for one norm over all gradients. `tf.clip_by_global_norm` makes every gradient NaN where
    a single value is not finite; here they stay, and reports name only the variables that overflowed.

    Args:
        grads: Unscaled gradients of one replica, a list; None is left out.
        clip_norm: The highest norm; a number or a scalar tensor.

    Returns:
        The clipped gradients, in their types and forms; and the norm that they had, a float64 scalar, since it may be
        beyond float32. It is infinite or NaN on a step that overflowed.

    Raises:
        TypeError: `grads` is no list of gradients, or the norm no number.
        ValueError: There is no gradient, or the norm is not finite and above 0.

    Example:
        >>> clipped, norm = clip_by_global_norm([tf.constant([3.0]), None, tf.constant([4.0])], 2.5)
        >>> [None if grad is None else grad.numpy().tolist() for grad in clipped], float(norm)
        ([[1.5], None, [2.0]], 5.0)
        >>> clipped, norm = clip_by_global_norm([tf.constant([3.0]), tf.constant([float("inf")])], 2.5)
        >>> [grad.numpy().tolist() for grad in clipped], float(norm)
        ([[3.0], [inf]], inf)
    """
    grads = _validated(grads)
    norm = reductions.global_norm(grads)
    factor = _factors(norm, clip_norm)
    return [numerics.shrink(grad, factor) for grad in grads], norm


def _factors(norms: tf.Tensor, clip_norm: _Number) -> tf.Tensor:
    if not tf.is_tensor(clip_norm):
        clip_norm = settings.positive("clip_norm", clip_norm)
    highest = tf.cast(clip_norm, tf.float64)
    # Not by `norms > highest`: a tensor that is NaN would clip nothing, in silence.
    clips = tf.logical_and(tf.math.is_finite(norms), tf.logical_not(norms <= highest))
    return tf.where(clips, highest / tf.where(clips, norms, 1), 1)


def _bound(name: str, value: _Number) -> tf.Tensor:
    return value if tf.is_tensor(value) else tf.constant(settings.number(name, value), tf.float64)


def _validated(given: Iterable[Gradient]) -> list[Gradient]:
    grads = lists.gradients(given)
    if not grads:
        raise ValueError("grads is empty: pass the gradients, one for each variable.")
    lists.refuse_all_none(grads)
    return grads
