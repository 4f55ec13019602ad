"""Keeps, on the device, what is known of the last step that was skipped as a spike."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.storage.state_variables import StateVariables
from tfmp.types import Done


class SpikeReport(NamedTuple):
    """How many steps were skipped as spikes since the session or the eager program began, and what the last one was.

    Attributes:
        names: The names of the variables, or their paths in Keras 3.
        shares: The share of each variable's gradient in the square of the norm of the last spike; float64, of shape
            `[len(names)]`. They are shares of the gradients that would have been applied, so after the script has
            clipped them. If replicas sum their gradients later, the largest norm among them counts for each gradient.
        norm: The norm of the last spike; float64.
        bound: The bound that the norm exceeded; float64.
        spikes: The number of steps that were skipped as spikes; int64.
    """

    names: list[str]
    shares: tf.Tensor
    norm: tf.Tensor
    bound: tf.Tensor
    spikes: tf.Tensor


class _LastSpike(NamedTuple):
    shares: tf.Tensor
    norm: tf.Tensor
    bound: tf.Tensor
    spikes: tf.Tensor


class SpikeRecord(tf.Module):
    """The last spike of the steps with one list of variables, in variables that a script need not initialize."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        nothing = _LastSpike(np.zeros([len(names)]), np.float64(0), np.float64(np.inf), np.int64(0))
        self._state = StateVariables(nothing, saved=False)

    def store(self, shares: tf.Tensor, norm: tf.Tensor, bound: tf.Tensor) -> Done:
        """Store a spike, and count it."""
        spikes = self._state.get("spikes") + 1
        return self._state.assign(_LastSpike(shares, tf.identity(norm), tf.identity(bound), spikes))

    def report(self) -> SpikeReport:
        """Return what is stored, with the names of the variables."""
        return SpikeReport(list(self._names), *self._state.read())
