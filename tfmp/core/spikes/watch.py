"""Looks for spikes in the steps of one optimizer or scaler, as its detector says."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core.overflow.found import Found
from tfmp.core.spikes.detector import SpikeDetector, SpikeState
from tfmp.core.storage.graph_registry import GraphList
from tfmp.core.storage.state_variables import StateVariables
from tfmp.types import Done


class Look(NamedTuple):
    """What one replica finds when it compares the norm of a step with the bound of a detector."""

    detector: SpikeDetector
    stored: StateVariables[SpikeState]
    #: The state before the step.
    state: SpikeState
    #: float64.
    norm: tf.Tensor
    #: float64.
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


class SpikeWatch:
    """Compares the norms of steps with the bound of a detector; those of different optimizers with different bounds."""

    def __init__(self, detector: SpikeDetector) -> None:
        self.detector = detector
        self._optimizers: list[tuple[Any, ...]] = []
        with tf.init_scope():
            if tf.executing_eagerly():
                _claim(_IN_EAGER_CODE.setdefault(detector, []), self)

    def look(self, optimizers: Sequence[object], norm: tf.Tensor) -> Look:
        """Compare the norm of a step of these optimizers, which step together, with the bound; on each replica."""
        with tf.init_scope():
            # Under a strategy, an Estimator makes an optimizer for each replica, and all may have one detector.
            if not tf.executing_eagerly() and tf.distribute.get_strategy().num_replicas_in_sync == 1:
                claims = [claim for claim in _IN_GRAPH.items() if claim.detector is self.detector]
                _claim([weakref.ref(claim.watch) for claim in claims], self)
                _IN_GRAPH.append(_Claim(self.detector, self))
        stored = self.detector.state_of(self._index_of(tuple(optimizers)))
        state = stored.read()
        return Look(self.detector, stored, state, norm, self.detector.bound(state))

    def _index_of(self, optimizers: tuple[Any, ...]) -> int:
        for index, known in enumerate(self._optimizers):
            if len(known) == len(optimizers) and all(map(_is, known, optimizers)):
                return index
        self._optimizers.append(optimizers)
        return len(self._optimizers) - 1


class _Claim(NamedTuple):
    detector: SpikeDetector
    watch: SpikeWatch


#: Which watch has a detector, in eager code and in each graph. A graph keeps its watches as long as it lives.
_IN_EAGER_CODE: "weakref.WeakKeyDictionary[SpikeDetector, list[weakref.ref[SpikeWatch]]]" = weakref.WeakKeyDictionary()
_IN_GRAPH: GraphList[_Claim] = GraphList("spike_detectors")


def _claim(others: "list[weakref.ref[SpikeWatch]]", watch: SpikeWatch) -> None:
    """Raise an error if another watch that is still in use has the detector."""
    if any(other() not in {None, watch} for other in others):
        raise ValueError(
            f"the {type(watch.detector).__name__} is used by another optimizer or scaler already, whose norms would be "
            "mixed with those of this one: make a detector for each."
        )
    others.append(weakref.ref(watch))


def _is(one: object, other: object) -> bool:
    return one is other
