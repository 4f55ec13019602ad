"""The norm of the gradients of a step: of the sum over all replicas, unscaled, before it is clipped."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.norms import global_norm
from tfmp.types import Gradients


class Measured(NamedTuple):
    """The gradients whose norm is that of a step."""

    grads: Gradients
    #: The number by which the gradients are still multiplied; None if they are in true magnitude.
    loss_scale: tf.Tensor | None
    #: True if they are the same on all replicas: summed over them, or averaged over Horovod's workers.
    is_summed: bool

    def norm(self, names: Sequence[str], distribution: Distribution, is_finite: tf.Tensor | None = None) -> tf.Tensor:
        """Return the norm, a float64 scalar, the same on all replicas.

        Errors show the `names` of the variables, if there is one for each gradient. `is_finite` is False if the norm is
        known not to be finite.
        """
        grads = self.grads
        if any(map(arithmetic.is_sparse, grads)) or not self.is_summed:
            grads = [arithmetic.map_values(arithmetic.widen, grad) for grad in grads]
        if not self.is_summed:
            is_named = len(names) == len(grads)
            grads = distribution.sums(grads, names if is_named else [f"gradient {i}" for i in range(len(grads))])
        norm = global_norm(list(map(arithmetic.added_up, grads)), is_finite=is_finite)
        return norm if self.loss_scale is None else norm / tf.cast(self.loss_scale, tf.float64)
