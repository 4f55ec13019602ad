"""Looks for spikes in the steps of one optimizer or scaler, as its detector says, and keeps what the last one was."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.overflow.found import Found
from tfmp.core.spikes.detector import SpikeDetector, SpikeState
from tfmp.core.storage.state_variables import StateVariables
from tfmp.types import Done


class SpikeWatch:
    """Compares the norms of steps with the bound of a detector; those of different optimizers with different bounds."""

    def __init__(self, detector: SpikeDetector) -> None:
        self.detector = detector
        self._optimizers: list[tuple[Any, ...]] = []
        with tf.init_scope():
            if tf.executing_eagerly():
                detector._claim(self)

    def look(self, optimizers: Sequence[object], norm: tf.Tensor) -> "Look":
        """Compare the norm of a step of these optimizers, which step together, with the bound; on each replica."""
        with tf.init_scope():
            # Under a strategy, an Estimator makes an optimizer for each replica, and all may have one detector.
            if not tf.executing_eagerly() and tf.distribute.get_strategy().num_replicas_in_sync == 1:
                self.detector._claim(self)
        stored = self.detector.state_of(self._index_of(tuple(optimizers)))
        state = stored.read()
        return Look(self.detector, stored, state, norm, self.detector.bound(state))

    def _index_of(self, optimizers: tuple[Any, ...]) -> int:
        for index, known in enumerate(self._optimizers):
            if len(known) == len(optimizers) and all(map(operator.is_, known, optimizers)):
                return index
        self._optimizers.append(optimizers)
        return len(self._optimizers) - 1


class Look(NamedTuple):
    """What one replica finds when it compares the norm of a step with the bound of a detector."""

    detector: SpikeDetector
    stored: StateVariables[SpikeState]
    #: The state before the step.
    state: SpikeState
    #: float64, as is the bound.
    norm: tf.Tensor
    bound: tf.Tensor

    @property
    def is_above(self) -> tf.Tensor:
        """True if the norm is above the bound; bool. That of a step that overflowed never is."""
        return tf.logical_and(tf.math.is_finite(self.norm), self.norm > self.bound)

    @property
    def is_skipped(self) -> tf.Tensor:
        """True if the step is skipped, unless it overflowed, in which case this says nothing; bool."""
        return self.detector.is_skipped(self.state, self.is_above)

    def store(self, found: Found) -> Done:
        """Store the state after a step; called once for all replicas."""
        after = self.detector.next_state(self.state, self.norm, found.usable, found.is_above, found.spike)
        return self.stored.assign(after)


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
