"""What observes steps without changing them: an interface for monitors, and records of graphs."""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.types import Done, Gradients


class StepMonitor(Protocol):
    """Looks at the gradients of each step, in ops that are a part of the step."""

    def _record(
        self, names: Sequence[str], grads: Gradients, loss_scale: tf.Tensor | None, distribution: Distribution
    ) -> Done:
        """Look at this replica's gradients; `loss_scale` is None if they are unscaled."""
