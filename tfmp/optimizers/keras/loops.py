"""Records what the user's training loop calls, which tells whether its gradients are scaled."""

import logging
from typing import Literal, TypeAlias

from tfmp.core import script_lines
from tfmp.types import Gradients

_logger = logging.getLogger("tfmp")

_Call: TypeAlias = Literal["scale_loss", "get_scaled_loss", "get_unscaled_gradients", "compute_gradients"]


class LoopRecord:
    """Remembers which method of a wrapper the user's training loop called last, and warns of calls that it lacks.

    A custom training loop can be written in the style of Keras 2 or of Keras 3. Every front-end supports both:

        Keras 2    get_scaled_loss    get_unscaled_gradients    apply_gradients
        Keras 3    scale_loss                                   apply_gradients, which unscales

    `apply_gradients` cannot tell from the gradients alone whether it must unscale them, so it asks which method was
    called last. All replicas call the same methods in the same order, so one record serves them all.
    `compute_gradients` of Keras 2 scales and unscales by itself. It is remembered under its own name, because Horovod's
    optimizer averages gradients in `compute_gradients` and nowhere else.

    Examples:
        >>> import tensorflow as tf
        >>> loop = LoopRecord()
        >>> loop.last_call = "scale_loss"
        >>> loop.are_scaled([tf.constant(1.0)], by_default=False)
        True
    """

    def __init__(self) -> None:
        self.last_call: _Call | None = None
        # The warnings that were given, each of which is given once.
        self._told: set[str] = set()

    def are_scaled(self, grads: Gradients, *, by_default: bool) -> bool:
        """Return whether gradients passed to `apply_gradients` are of a scaled loss; warn if in doubt.

        `by_default` is the answer if no method of the wrapper was called before.
        """
        scaled = self.last_call == "scale_loss" or (self.last_call is None and by_default)
        if scaled and self.last_call is None:
            self._warn_once(
                grads,
                "gradients are divided by the loss scale, and scale_loss was not called before: differentiate what "
                "scale_loss returns, not the loss itself.",
            )
        elif not scaled and self.last_call not in {"get_unscaled_gradients", "compute_gradients"}:
            missing = "get_scaled_loss" if self.last_call is None else "get_unscaled_gradients"
            self._warn_once(
                grads,
                f"gradients are applied as they are, and {missing} was not called before: scale the loss by "
                "get_scaled_loss and the gradients by get_unscaled_gradients, or call scale_loss alone.",
            )
        return scaled

    def warn_if_never_scaled(self, grads: Gradients) -> None:
        """Warn if gradients passed to `get_unscaled_gradients` cannot be of a scaled loss."""
        if self.last_call is None:
            self._warn_once(
                grads,
                "gradients are unscaled, and the loss was not scaled before: differentiate what get_scaled_loss "
                "returns, not the loss itself.",
            )

    def _warn_once(self, grads: Gradients, message: str) -> None:
        """Warn once with a message, and with the line that computed the gradients, or else the one that runs now."""
        if message in self._told:
            return
        self._told.add(message)
        line = script_lines.with_library(script_lines.line_of_gradients(grads))
        _logger.warning("%s: %s", line, message)
