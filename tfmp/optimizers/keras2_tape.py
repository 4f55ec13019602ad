"""The tape for a `compute_gradients` that a user wrote for an optimizer of Keras 2."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.types import Gradient, Gradients


class ScalingTape:
    """Stands for a tape: differentiates the scaled loss, and returns gradients in their true magnitude.

    A method that clips gradients, or adds something to them, would do so in the wrong proportion if the gradients were
    scaled.

    Examples:
        >>> w = tf.Variable(3.0)
        >>> tape = ScalingTape(tf.GradientTape(), lambda loss: loss * 8, lambda grads: [grad / 8 for grad in grads])
        >>> with tape:
        ...     loss = w * w
        >>> [float(grad) for grad in tape.gradient(loss, [w])]
        [6.0]
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        scale: Callable[[tf.Tensor], tf.Tensor],
        unscale: Callable[[Gradients], list[Gradient]],
    ) -> None:
        self._tape = tape
        self._scale = scale
        self._unscale = unscale

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any method of a tape
        return getattr(self._tape, name)

    def __enter__(self) -> "ScalingTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._tape.__exit__(*raised)

    def gradient(self, target: tf.Tensor, sources: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a tape's
        """Return the gradients of a loss in their true magnitude, in the structure of the sources."""
        with self._tape:
            scaled = self._scale(target)
        grads = self._tape.gradient(scaled, sources, *args, **kwargs)
        flat: Sequence[Gradient] = tf.nest.flatten(grads)
        return tf.nest.pack_sequence_as(grads, self._unscale(flat))
