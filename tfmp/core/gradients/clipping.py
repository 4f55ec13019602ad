"""Clips gradients without hiding infinities and NaN, so that a step that overflowed is still skipped."""

from collections.abc import Iterable
from typing import Any, TypeAlias, overload

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.norms import global_norm, norm_of_each
from tfmp.core.gradients.unclipped import note_clipped
from tfmp.types import Gradient

_Number: TypeAlias = float | tf.Tensor


@overload
def clip_by_value(grads: Iterable[Gradient], clip_value_min: _Number, clip_value_max: _Number) -> list[Gradient]: ...
@overload
def clip_by_value(grads: tf.Tensor | tf.IndexedSlices, clip_value_min: _Number, clip_value_max: _Number) -> Any: ...  # noqa: ANN401
def clip_by_value(grads: Any, clip_value_min: _Number, clip_value_max: _Number) -> Any:
    """Clip the finite values of gradients to a range, and leave infinities and NaN as they are.

    Use this instead of `tf.clip_by_value` with loss scaling. `tf.clip_by_value` replaces an infinity by a bound of the
    range, so that a step that overflowed looks finite and is applied. Here the infinity remains, and the step is
    skipped. Call it on unscaled gradients, before they are applied.

    Args:
        grads: The unscaled gradients of one replica, a list; or a single gradient, as in `tf.clip_by_value`. An entry
            None stays None. In an `IndexedSlices` each row is clipped separately, as in TensorFlow.
        clip_value_min: The lower bound; a number or a scalar tensor.
        clip_value_max: The upper bound; a number or a scalar tensor.

    Returns:
        A list of the clipped gradients, or the single clipped gradient. Each keeps its dtype and its form: dense,
        `IndexedSlices` or None.

    Raises:
        TypeError: `grads` is neither a list of gradients nor a gradient, or a bound is not a number.
        ValueError: `grads` contains no gradient, a bound is not finite, or the lower bound is above the upper one.

    Examples:
        >>> clip_by_value([tf.constant([3.0, -0.5, float("inf")]), None], -1, 1)[0].numpy().tolist()
        [1.0, -0.5, inf]
        >>> clip_by_value(tf.constant([3.0, -0.5]), -1, 1).numpy().tolist()
        [1.0, -0.5]
    """
    if tf.is_tensor(grads):
        return clip_by_value([grads], clip_value_min, clip_value_max)[0]
    grads = _validated(grads)
    lowest, highest = _bound("clip_value_min", clip_value_min), _bound("clip_value_max", clip_value_max)
    are_numbers = settings.is_number(clip_value_min) and settings.is_number(clip_value_max)
    if are_numbers and clip_value_min > clip_value_max:
        raise ValueError(
            f"clip_value_min must not be greater than clip_value_max, got {clip_value_min!r} and {clip_value_max!r}."
        )
    clipped = [arithmetic.map_values(lambda values: _clip_values(values, lowest, highest), grad) for grad in grads]
    for new, grad in zip(clipped, grads, strict=True):
        note_clipped(new, grad)
    return clipped


def _clip_values(values: tf.Tensor, lowest: tf.Tensor, highest: tf.Tensor) -> tf.Tensor:
    clipped = tf.clip_by_value(values, tf.cast(lowest, values.dtype), tf.cast(highest, values.dtype))
    return tf.where(tf.math.is_finite(values), clipped, values)


@overload
def clip_by_norm(grads: Iterable[Gradient], clip_norm: _Number) -> list[Gradient]: ...
@overload
def clip_by_norm(grads: tf.Tensor | tf.IndexedSlices, clip_norm: _Number) -> Any: ...  # noqa: ANN401
def clip_by_norm(grads: Any, clip_norm: _Number) -> Any:
    """Clip each gradient to a maximum L2 norm, separately for each variable.

    The rule for each gradient `g`:

        g * clip_norm / norm(g)    if norm(g) is finite and greater than clip_norm
        g                          otherwise

    A gradient with an infinity or a NaN is therefore returned unchanged, and the step is skipped. `tf.clip_by_norm`
    turns such a gradient into NaN and zeros. It also turns a finite gradient whose squares overflow into zeros; this
    function clips it correctly. Call it on unscaled gradients, before they are applied.

    Args:
        grads: The unscaled gradients of one replica, a list; or a single gradient, as in `tf.clip_by_norm`. An entry
            None stays None. The norm of an `IndexedSlices` is the norm of its rows, as in TensorFlow: rows with the
            same index count separately.
        clip_norm: The maximum norm; a number or a scalar tensor.

    Returns:
        A list of the clipped gradients, or the single clipped gradient. Each keeps its dtype and its form: dense,
        `IndexedSlices` or None.

    Raises:
        TypeError: `grads` is neither a list of gradients nor a gradient, or `clip_norm` is not a number.
        ValueError: `grads` contains no gradient, or `clip_norm` is not finite or not greater than 0.

    Examples:
        >>> clipped = clip_by_norm([tf.constant([3.0, 4.0]), tf.constant([1.0, float("inf")])], 2.5)
        >>> [grad.numpy().tolist() for grad in clipped]
        [[1.5, 2.0], [1.0, inf]]
        >>> clip_by_norm(tf.constant([3.0, 4.0]), 2.5).numpy().tolist()
        [1.5, 2.0]
    """
    if tf.is_tensor(grads):
        return clip_by_norm([grads], clip_norm)[0]
    grads = _validated(grads)
    factors = tf.unstack(_factors(norm_of_each(grads), clip_norm), num=len(grads))
    return [arithmetic.shrink(grad, factor) for grad, factor in zip(grads, factors, strict=True)]


def clip_by_global_norm(grads: Iterable[Gradient], clip_norm: _Number) -> tuple[list[Gradient], tf.Tensor]:
    """Clip all gradients together to a maximum L2 norm, which keeps the direction of the step.

    The rule, where `norm` is the L2 norm of all values of all gradients:

        g * clip_norm / norm    for every gradient g, if norm is finite and greater than clip_norm
        g                       for every gradient g, otherwise

    If any value is infinite or NaN, all gradients are therefore returned unchanged. The step is skipped, and the
    overflow reports name only the variables that overflowed. `tf.clip_by_global_norm` makes every gradient NaN in that
    case, so that all variables seem to have overflowed. Call this function on unscaled gradients, before they are
    applied.

    Args:
        grads: The unscaled gradients of one replica, a list. An entry None stays None and adds nothing to the norm.
        clip_norm: The maximum norm; a number or a scalar tensor.

    Returns:
        A pair. First, a list of the clipped gradients; each keeps its dtype and its form. Second, the norm before
        clipping, as a float64 scalar because it can exceed the range of float32. If a gradient overflowed, this norm
        is infinite or NaN.

    Raises:
        TypeError: `grads` is not a list of gradients, or `clip_norm` is not a number.
        ValueError: `grads` contains no gradient, or `clip_norm` is not finite or not greater than 0.

    Examples:
        >>> clipped, norm = clip_by_global_norm([tf.constant([3.0]), None, tf.constant([4.0])], 2.5)
        >>> [None if grad is None else grad.numpy().tolist() for grad in clipped], float(norm)
        ([[1.5], None, [2.0]], 5.0)
        >>> clipped, norm = clip_by_global_norm([tf.constant([3.0]), tf.constant([float("inf")])], 2.5)
        >>> [grad.numpy().tolist() for grad in clipped], float(norm)
        ([[3.0], [inf]], inf)
    """
    grads = _validated(grads)
    norm = global_norm(grads)
    factor = _factors(norm, clip_norm)
    return [arithmetic.shrink(grad, factor) for grad in grads], norm


def _factors(norms: tf.Tensor, clip_norm: _Number) -> tf.Tensor:
    if not tf.is_tensor(clip_norm):
        clip_norm = tf.constant(settings.positive("clip_norm", clip_norm), tf.float64)
    highest = tf.cast(clip_norm, tf.float64)
    # If `clip_norm` is a tensor and NaN, the factor becomes NaN, and so do the gradients. `norms > highest` is False
    # then; and TensorFlow's graph optimizer makes that of `not norms <= highest`.
    clips = tf.logical_and(tf.math.is_finite(norms), tf.logical_or(norms > highest, tf.math.is_nan(highest)))
    # Both branches of `tf.where` are computed, so the inner one keeps 0, infinity and NaN out of the division.
    return tf.where(clips, highest / tf.where(clips, norms, 1), 1)


def _bound(name: str, value: _Number) -> tf.Tensor:
    return value if tf.is_tensor(value) else tf.constant(settings.number(name, value), tf.float64)


def _validated(given: Iterable[Gradient]) -> list[Gradient]:
    grads = lists.of_tensors(lists.gradients(given))
    if not grads:
        raise ValueError("grads is empty: pass the gradients, one for each variable.")
    lists.refuse_all_none(grads)
    return grads
