"""Remembers from which scaled gradients unscaled and clipped ones were computed, in a graph.

A step can then compute them again in the program that applies them. The tensors in between are never computed: a graph
computes only what is used.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmp.types import Gradient, Gradients

_ATTRIBUTE = "_tfmp_origin"
#: None on a gradient that was not clipped, and that somebody wants to know after it was clipped.
_UNCLIPPED = "_tfmp_unclipped"


class Change(NamedTuple):
    """Computes the values of a gradient from others, by functions that are called one after the other.

    Examples:
        >>> change = Change((tf.multiply, tf.add), ((tf.constant(2.0),), (tf.constant(1.0),)))
        >>> change.apply(tf.constant([3.0])).numpy()
        array([7.], dtype=float32)
    """

    functions: tuple[Callable[..., tf.Tensor], ...]
    #: For each function, the tensors that it takes besides the values.
    tensors: tuple[tuple[tf.Tensor, ...], ...]

    def apply(self, values: tf.Tensor) -> tf.Tensor:
        """Return the changed values."""
        for function, tensors in zip(self.functions, self.tensors, strict=True):
            values = function(values, *tensors)
        return values

    def with_tensors(self, tensors: Iterator[tf.Tensor]) -> "Change":
        """Return the change with other tensors, which are taken from an iterator."""
        return self._replace(tensors=tuple(tuple(next(tensors) for _ in each) for each in self.tensors))


class Origin(NamedTuple):
    """How a gradient was computed from that of a scaled loss: divided by the loss scale, and then perhaps changed."""

    scaled: Gradient
    loss_scale: tf.Tensor
    #: Computes the gradient's values from the unscaled ones; None if these were not changed.
    change: Change | None = None
    #: Boolean scalars. If all of them are True, the change turns no finite value into an infinity or a NaN, and no
    #: infinity or NaN into a finite value.
    keeps_finite: Sequence[tf.Tensor] = ()


def note(grad: Gradient, origin: Origin) -> None:
    """Remember how a gradient was computed, if it is in a graph; None and eager tensors are ignored."""
    values = _values(grad)
    if values is not None and not tf.executing_eagerly():
        setattr(values, _ATTRIBUTE, origin)


def origin_of(grad: Gradient) -> Origin | None:
    """Return how a gradient was computed; None if that is not known.

    Examples:
        >>> @tf.function
        ... def is_known(scaled):
        ...     grad = scaled / 8
        ...     note(grad, Origin(scaled, tf.constant(8.0)))
        ...     return origin_of(grad).scaled is scaled, origin_of(grad + 1) is None
        >>> [bool(known) for known in is_known(tf.constant([16.0]))]
        [True, True]
    """
    return getattr(_values(grad), _ATTRIBUTE, None)


def note_change(
    changed: Gradient,
    grad: Gradient,
    function: Callable[..., tf.Tensor],
    keeps_finite: tf.Tensor,
    tensors: Sequence[tf.Tensor] = (),
    *,
    keeps_zero: bool = True,
) -> None:
    """Remember that a function of the values made a gradient from another one, if the origin of the latter is known.

    The origin of a sparse gradient is forgotten if the function may change zeros: a program that computes the gradient
    again may have added rows of zeros to it.

    Args:
        changed: The gradient that was made.
        grad: The other one.
        function: The function, of the values and of the tensors.
        keeps_finite: A boolean scalar: True if the function keeps finite values finite, and others not finite.
        tensors: The tensors.
        keeps_zero: True if the function certainly keeps zeros.
    """
    values = _values(grad)
    if values is not None and hasattr(values, _UNCLIPPED):
        setattr(_values(changed), _UNCLIPPED, unclipped(grad))
    origin = origin_of(grad)
    if origin is None or (isinstance(grad, tf.IndexedSlices) and not keeps_zero):
        return
    before = origin.change or Change((), ())
    change = Change((*before.functions, function), (*before.tensors, tuple(tensors)))
    note(changed, origin._replace(change=change, keeps_finite=[*origin.keeps_finite, keeps_finite]))


def keep_unclipped(grad: Gradient) -> None:
    """Let what is clipped from a gradient remember the gradient, in eager code too; None is ignored.

    Eager tensors then live as long as the clipped ones. This is for steps whose norm somebody wants to know.
    """
    values = _values(grad)
    if values is not None:
        setattr(values, _UNCLIPPED, None)


def unclipped(grad: Gradient) -> Gradient:
    """Return the gradient from which one was clipped, if that is known; otherwise the gradient itself.

    Examples:
        >>> import tfmp
        >>> grad = tf.constant([3.0, 4.0])
        >>> keep_unclipped(grad)
        >>> unclipped(tfmp.clip_by_norm(grad, 1.0)) is grad
        True
    """
    known = getattr(_values(grad), _UNCLIPPED, None)
    return grad if known is None else known


class Derivation(NamedTuple):
    """How all gradients of a step were computed from scaled ones."""

    scaled: Gradients
    loss_scale: tf.Tensor
    #: For each gradient, what computes its values from the unscaled ones; None if these were not changed.
    changes: Sequence[Change | None]
    #: The boolean scalars of all changes; see `Origin`.
    keeps_finite: Sequence[tf.Tensor]

    @property
    def is_unscaling(self) -> bool:
        """True if the gradients were unscaled, and not changed in any other way."""
        return all(change is None for change in self.changes)


def derivation_of(grads: Gradients) -> Derivation | None:
    """Return how gradients were computed; None if that is unknown for one, or if their loss scales are not the same."""
    origins = [origin_of(grad) for grad in grads]
    known = [origin for origin in origins if origin is not None]
    if not known or len(known) < sum(grad is not None for grad in grads):
        return None
    graph, loss_scale = tf.compat.v1.get_default_graph(), known[0].loss_scale
    # An eager tensor, which has no graph, can be used in any.
    is_here = all(getattr(_values(origin.scaled), "graph", graph) is graph for origin in known)
    if not is_here or any(origin.loss_scale is not loss_scale for origin in known):
        return None
    return Derivation(
        scaled=[None if origin is None else origin.scaled for origin in origins],
        loss_scale=loss_scale,
        changes=[None if origin is None else origin.change for origin in origins],
        keeps_finite=[flag for origin in known for flag in origin.keeps_finite],
    )


def _values(grad: Gradient) -> tf.Tensor | None:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad
