"""Clips gradients without hiding infinities and NaN, so that a step that overflowed is still skipped.

It remembers from which gradients others were clipped, for those who want to know the norm of a step before clipping.
"""

import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias, overload

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.gradients.arithmetic import map_values, widen
from tfmp.core.gradients.measures import global_norm, norm_of_each
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Gradient

_Number: TypeAlias = float | tf.Tensor
#: By the identity of the tensor with a gradient's values: a weak reference to this tensor, and the gradient from which
#: it was clipped; None if it was not clipped.
_Known: TypeAlias = dict[int, tuple["weakref.ref[tf.Tensor]", Gradient]]

# State of the module: what clips gradients knows no step that could keep it. An entry goes with its tensor.
_IN_EAGER_CODE: _Known = {}
_IN_GRAPH = ("tfmp", "unclipped")
#: A smaller factor is applied in two parts: below 2**-126 it is denormal in float32, and CPU kernels make it 0.
_SMALLEST_IN_ONE_PART = 2.0**-64


@overload
def clip_by_value(grads: Iterable[Gradient], clip_value_min: _Number, clip_value_max: _Number) -> list[Gradient]: ...
@overload
def clip_by_value(grads: tf.Tensor | tf.IndexedSlices, clip_value_min: _Number, clip_value_max: _Number) -> Any: ...  # noqa: ANN401
def clip_by_value(grads: Any, clip_value_min: _Number, clip_value_max: _Number) -> Any:
    """Clip the finite values of gradients to a range, and leave infinities and NaN as they are.

    `tf.clip_by_value` replaces an infinity by a bound of the range, so that a step that overflowed looks finite and is
    applied. Here the infinity remains, and the step is skipped.

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
    return [_noted(map_values(lambda values: _clip_values(values, lowest, highest), grad), grad) for grad in grads]


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

    So a gradient with an infinity or a NaN is returned unchanged, and the step is skipped. `tf.clip_by_norm` turns it
    into NaN and zeros, and a finite gradient whose squares overflow into zeros; this function clips that correctly.

    Args:
        grads: As in `clip_by_value`. The norm of an `IndexedSlices` is the norm of its rows, as in TensorFlow: rows
            with the same index count separately.
        clip_norm: The maximum norm; a number or a scalar tensor.

    Returns:
        The clipped gradients, or the single clipped gradient, as `clip_by_value` returns them.

    Raises:
        TypeError: `grads` is neither a list of gradients nor a gradient, or `clip_norm` is not a number.
        ValueError: `grads` contains no gradient, or `clip_norm` is not finite or not greater than 0.

    Examples:
        >>> clipped = clip_by_norm([tf.constant([3.0, 4.0]), tf.constant([1.0, float("inf")])], 2.5)
        >>> [grad.numpy().tolist() for grad in clipped]
        [[1.5, 2.0], [1.0, inf]]
    """
    if tf.is_tensor(grads):
        return clip_by_norm([grads], clip_norm)[0]
    grads = _validated(grads)
    factors = tf.unstack(_factors(norm_of_each(grads), clip_norm), num=len(grads))
    return [_shrink(grad, factor) for grad, factor in zip(grads, factors, strict=True)]


def clip_by_global_norm(grads: Iterable[Gradient], clip_norm: _Number) -> tuple[list[Gradient], tf.Tensor]:
    """Clip all gradients together to a maximum L2 norm, which keeps the direction of the step.

    The rule, where `norm` is the L2 norm of all values of all gradients:

        g * clip_norm / norm    for every gradient g, if norm is finite and greater than clip_norm
        g                       for every gradient g, otherwise

    So if any value is infinite or NaN, all gradients are returned unchanged, the step is skipped, and the overflow
    reports name only the variables that overflowed. `tf.clip_by_global_norm` makes every gradient NaN, so that all
    variables seem to have overflowed.

    Args:
        grads: The unscaled gradients of one replica, a list. An entry None stays None and adds nothing to the norm.
        clip_norm: The maximum norm; a number or a scalar tensor.

    Returns:
        The list of the clipped gradients; each keeps its dtype and its form. And the norm before clipping, a float64
        scalar, because it can exceed the range of float32; infinite or NaN if a gradient overflowed.

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
    return [_shrink(grad, factor) for grad in grads], norm


def _factors(norms: tf.Tensor, clip_norm: _Number) -> tf.Tensor:
    if not tf.is_tensor(clip_norm):
        clip_norm = tf.constant(settings.positive("clip_norm", clip_norm), tf.float64)
    highest = tf.cast(clip_norm, tf.float64)
    # If `clip_norm` is a tensor and NaN, the factor becomes NaN, and so do the gradients. `norms > highest` is False
    # then; and TensorFlow's graph optimizer makes that of `not norms <= highest`.
    clips = tf.logical_and(tf.math.is_finite(norms), tf.logical_or(norms > highest, tf.math.is_nan(highest)))
    # Both branches of `tf.where` are computed, so the inner one keeps 0, infinity and NaN out of the division.
    return tf.where(clips, highest / tf.where(clips, norms, 1), 1)


def _shrink(grad: Gradient, factor: tf.Tensor) -> Gradient:
    """Multiply a gradient by a float64 scalar of at most 1, which may be denormal in the gradient's dtype."""
    # Eager code knows the factor, and one op mostly suffices; each op below would read and write all values.
    known = float(factor) if tf.executing_eagerly() else None
    if known == 1:
        return grad

    def shrink(values: tf.Tensor) -> tf.Tensor:
        wide = widen(values)
        if known is not None and known >= _SMALLEST_IN_ONE_PART:
            return tf.cast(wide * tf.cast(factor, wide.dtype), values.dtype)
        divisor = tf.where(factor < _SMALLEST_IN_ONE_PART, tf.constant(2.0**64, factor.dtype), 1)
        # A division first: TensorFlow's graph optimizer would combine two multiplications into one by the denormal
        # factor. XLA does not, and divides more slowly than it multiplies.
        first = wide * tf.cast(1 / divisor, wide.dtype) if within_xla() else wide / tf.cast(divisor, wide.dtype)
        return tf.cast(first * tf.cast(factor * divisor, wide.dtype), values.dtype)

    return _noted(map_values(shrink, grad), grad)


def _bound(name: str, value: _Number) -> tf.Tensor:
    return value if tf.is_tensor(value) else tf.constant(settings.number(name, value), tf.float64)


def _validated(given: Iterable[Gradient]) -> list[Gradient]:
    grads = lists.of_tensors(lists.gradients(given))
    if not grads:
        raise ValueError("grads is empty: pass the gradients, one for each variable.")
    lists.refuse_all_none(grads)
    return grads


def keep_unclipped(grad: Gradient, before: Gradient = None) -> None:
    """Let what is clipped from a gradient be known as such; the gradient then lives as long as that.

    `before` is the gradient from which this one was clipped itself.
    """
    values = lists.values(grad)
    if values is not None:
        known, number = _known_with(grad), id(values)
        known[number] = weakref.ref(values, lambda _: known.pop(number, None)), before


def unclipped(grad: Gradient) -> Gradient:
    """Return the gradient from which one was clipped, if that is known; otherwise the gradient itself."""
    before = _known_with(grad).get(id(lists.values(grad)), (None, None))[1]
    return grad if before is None else before


def _noted(clipped: Gradient, grad: Gradient) -> Gradient:
    """Return a gradient that was clipped from another one, and remember that, if the other one is known."""
    if id(lists.values(grad)) in _known_with(grad):
        keep_unclipped(clipped, unclipped(grad))
    return clipped


def _known_with(grad: Gradient) -> _Known:
    """Return what is known of the tensors of a gradient's graph, or of those of eager code."""
    values = lists.values(grad)
    if not tf.is_symbolic_tensor(values):
        return _IN_EAGER_CODE
    # In the graph itself, which refers to its tensors, and is deleted together with them.
    kept: list[_Known] = values.graph.get_collection_ref(_IN_GRAPH)
    if not kept:
        kept[:] = [{}]
    return kept[0]
