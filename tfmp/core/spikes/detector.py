"""Decides which steps are spikes: those whose gradient norm is an outlier among the norms of the steps before."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.storage.graph_variables import OncePerGraph
from tfmp.core.storage.state_variables import StateVariables
from tfmp.types import AddVariable, Done

_WINDOW, _DEVIATIONS, _MIN_FACTOR = 128, 4.0, 3.0


class SpikeState(NamedTuple):
    """The state of the rule, for one optimizer."""

    #: The norms of the last applied steps, in no particular order; float64, of shape `[window]`.
    spike_window: tf.Tensor
    #: The number of norms that were stored there. Once it is `2 * window`, it starts again from `window`; int32.
    spike_window_count: tf.Tensor
    #: The steps in a row whose norm was above the bound, at most `max_consecutive_skips`; int32.
    consecutive_spikes: tf.Tensor
    #: How often that number reached `max_consecutive_skips`; int32.
    lasting_changes: tf.Tensor


class SpikeCount(NamedTuple):
    """The count of a detector since the session, or the eager program, began."""

    #: Steps that were skipped as spikes; int64.
    skipped_spikes: tf.Tensor


class SpikeDetector(tf.Module):
    """Decides which steps are skipped because their gradient norm is an outlier: a spike.

    Pass a detector as `skip_spikes` to `tfmp.LossScaleOptimizer` or `tfmp.GradScaler`. A single bad batch can give
    gradients that are finite but far larger than usual, and one such step can undo days of training. A step that is
    skipped as a spike changes no weight, no slot and no count of steps. For the manager it is a finite step: it does
    not lower the loss scale, and a `tfmp.LogMaxLossScaleManager` observes it.

    The rule, where `norm` is the L2 norm of the unscaled gradients of all replicas together, before they are clipped:

        median, deviation = those of log(norm) in the last `window` applied steps
        spike             = norm > exp(median + max(deviations * deviation, log(min_factor)))

    The deviation is 1.4826 times the median of the distances from the median, which is the standard deviation if the
    distribution is normal. Spikes that were applied hardly change medians.

    * Before the window is full there is no bound, so no step is a spike.
    * After `max_consecutive_skips` spikes in a row, the gradients have changed for good: the next steps are applied,
      and enter the window, until a norm is within the bound again.
    * With `max_norm`, a larger norm is a spike too, from the first step on. Without other settings, there is then no
      window.

    All replicas take the same decision. If a `tfmp.GradScaler` has several optimizers, the norms of each are compared
    with its own earlier ones. Every `tfmp.LossScaleOptimizer` and `tfmp.GradScaler` needs a detector of its own.

    The state is saved with that of the loss-scale manager: by Keras with the optimizer, by a `tf.train.Checkpoint` of
    the optimizer, the scaler or the detector, and in a TF1 graph by a `tf.compat.v1.train.Saver`.

    Args:
        window: The number of norms that a step is compared with, at least 2; 128 unless only `max_norm` is given.
        deviations: The number of deviations by which the logarithm of a spike lies above the median, greater than 0;
            by default 4.
        min_factor: A spike is more than this many times the median, however small the deviation is; greater than 1,
            by default 3.
        max_norm: The largest norm that is no spike, greater than 0. By default there is no fixed bound.
        max_consecutive_skips: The number of spikes in a row after which a step is applied.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Examples:
        >>> import tfmp
        >>> w = tf.Variable(0.0)
        >>> opt = tfmp.LossScaleOptimizer(
        ...     tf.compat.v1.train.GradientDescentOptimizer(1.0), 1024, skip_spikes=SpikeDetector(max_norm=5))
        >>> for factor in (1.0, 100.0, 2.0):
        ...     _ = opt.minimize(lambda: w * factor, var_list=[w])
        ...     print(float(opt.gradient_norm), float(w))
        1.0 -1.0
        100.0 -1.0
        2.0 -3.0
        >>> int(opt.skipped_spikes), float(opt.loss_scale)
        (1, 1024.0)

    Source: the SkipStep optimizers of OLMo-core.
    """

    def __init__(
        self,
        window: int | None = None,
        deviations: float | None = None,
        *,
        min_factor: float | None = None,
        max_norm: float | None = None,
        max_consecutive_skips: int = 10,
    ) -> None:
        super().__init__()
        self._max_norm = None if max_norm is None else settings.positive("max_norm", max_norm)
        has_window = max_norm is None or any(each is not None for each in (window, deviations, min_factor))
        self._window = settings.count("window", _WINDOW if window is None else window, least=2) if has_window else None
        self._deviations = settings.positive("deviations", _DEVIATIONS if deviations is None else deviations)
        self._min_factor = settings.number("min_factor", _MIN_FACTOR if min_factor is None else min_factor)
        # If all norms were the same, a factor of 1 would leave it to rounding whether the next one is above the bound.
        if not self._min_factor > 1:
            raise ValueError(f"min_factor must be greater than 1, got {min_factor!r}.")
        self._max_consecutive_skips = settings.count("max_consecutive_skips", max_consecutive_skips)
        #: The states, in the order in which optimizers first stepped. The name is a part of the keys in a checkpoint.
        self.states: list[StateVariables[SpikeState]] = []
        self._count = StateVariables(SpikeCount(np.int64(0)), saved=False)
        # The optimizer or scaler that has the detector: in eager code, and in each graph, which keeps it alive.
        self._owner: weakref.ref[Any] | None = None
        self._owners_in_graph: OncePerGraph[list[Any]] = OncePerGraph(list)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; Keras saves them with a model."""
        return {
            "window": self._window,
            "deviations": None if self._window is None else self._deviations,
            "min_factor": None if self._window is None else self._min_factor,
            "max_norm": self._max_norm,
            "max_consecutive_skips": self._max_consecutive_skips,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SpikeDetector":
        """Make a detector from what `get_config` returned."""
        return cls(**config)

    def __repr__(self) -> str:
        """Return the class with the settings that are in use."""
        shown = settings.not_default(type(self), self.get_config())
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Return the state of eager mode as Python numbers, for example to save it as JSON.

        Its entry `states` has the norms of the window and three counts for each optimizer, in the order of first steps.
        """
        return {"states": [state.numbers() for state in self.states]}

    def load_state_dict(self, state_dict: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Restore the state of eager mode from what `state_dict` returned.

        Raises:
            TypeError: `state_dict` is not such a dictionary, or holds something else than numbers.
            ValueError: It has another window, or a number is out of range. The state is then unchanged.
        """
        self.loading(state_dict)()

    def loading(self, state_dict: Mapping[str, Sequence[Mapping[str, Any]]]) -> Callable[[], None]:
        """Validate what `load_state_dict` is given, and return the function that loads it."""
        if not isinstance(state_dict, Mapping) or set(state_dict) != {"states"}:
            raise TypeError(f"state_dict must be what state_dict() of a SpikeDetector returned, got {state_dict!r}.")
        states = list(state_dict["states"])
        for state in states:
            self._validate_state(state)

        def load() -> None:
            missing = [self._initial_state()._asdict()] * (len(self.states) - len(states))
            for index, state in enumerate([*states, *missing]):
                self.state_of(index).load(state)

        return load

    def _validate_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or set(state) != set(SpikeState._fields):
            raise TypeError(f"a state must have the entries {', '.join(SpikeState._fields)}, got {state!r}.")
        norms = [settings.at_least_0("spike_window", norm) for norm in state["spike_window"]]
        if len(norms) != self._window_length:
            raise ValueError(
                f"spike_window must have {self._window_length} norms, got {len(norms)}: as many as window."
            )
        for name in SpikeState._fields[1:]:
            settings.count(name, state[name], least=0)

    def store_in(self, add_variable: AddVariable) -> None:
        """Keep the state in variables of a Keras optimizer, as `tfmp.LossScaleManager.store_in` does.

        Raises:
            ValueError: Another optimizer already holds the state: each optimizer needs a detector of its own.
        """
        if self.state_of(0).is_hosted:
            raise ValueError(
                "the spike detector keeps its state in another Keras optimizer already: make a detector for each."
            )
        self.state_of(0).store_in(add_variable)
        self._count.store_in(add_variable)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets; it has no owner yet."""
        return vars(self) | {"_owner": None}

    def _claim(self, owner: object) -> None:
        """Refuse a second owner: in eager code while the first one lives, in a graph for good."""
        with tf.init_scope():
            is_eager = tf.executing_eagerly()
            owners = self._owners_in_graph.get()
            if is_eager and self._owner is not None:
                owners = [self._owner()]
            if any(each not in (None, owner) for each in owners):
                raise ValueError(
                    f"the {type(self).__name__} is used by another optimizer or scaler already, whose norms would be "
                    "mixed with those of this one: make a detector for each."
                )
            if is_eager:
                self._owner = weakref.ref(owner)
            else:
                owners[:] = [owner]

    def count(self, spike: tf.Tensor) -> Done:
        """Count a step, if it was skipped as a `spike`; a boolean scalar."""
        return self._count.assign(SpikeCount(self.skipped_spikes + tf.cast(spike, tf.int64)))

    @property
    def skipped_spikes(self) -> tf.Tensor:
        """The number of steps skipped as spikes since the session, or the eager program, began; an int64 scalar."""
        return self._count.get("skipped_spikes")

    @property
    def lasting_changes(self) -> tf.Tensor:
        """How often `max_consecutive_skips` spikes came in a row, so that steps were applied; an int32 scalar."""
        return tf.add_n([tf.constant(0), *(state.get("lasting_changes") for state in self.states)])

    @property
    def max_consecutive_skips(self) -> int:
        """The number of spikes in a row after which a step is applied."""
        return self._max_consecutive_skips

    def state_of(self, index: int) -> StateVariables[SpikeState]:
        """Return the state for the optimizer that was the `index`-th to step."""
        while len(self.states) <= index:
            self.states.append(StateVariables(self._initial_state(), saved=True))
        self.states[index].create()
        return self.states[index]

    @property
    def _window_length(self) -> int:
        # Without a window it holds the last norm, which nobody reads: TensorFlow's workers crash when they make a
        # variable without elements under a MultiWorkerMirroredStrategy (2.15 to 2.21).
        return self._window or 1

    def _initial_state(self) -> SpikeState:
        return SpikeState(np.zeros([self._window_length]), np.int32(0), np.int32(0), np.int32(0))

    def bound(self, state: SpikeState) -> tf.Tensor:
        """Return the norm above which a step is a spike, given the state before it; infinite if there is none yet."""
        bound = tf.constant(np.inf, tf.float64)
        if self._window is not None:
            logarithms = tf.math.log(state.spike_window)
            median = _median(logarithms)
            deviation = _DEVIATION_OF_NORMAL * _median(tf.abs(logarithms - median))
            spread = tf.maximum(self._deviations * deviation, math.log(self._min_factor))
            bound = tf.where(state.spike_window_count < self._window, bound, tf.exp(median + spread))
        return bound if self._max_norm is None else tf.minimum(bound, self._max_norm)

    def is_skipped(self, state: SpikeState, is_above: tf.Tensor) -> tf.Tensor:
        """Return whether a step with finite gradients is skipped, given the state before it."""
        return tf.logical_and(is_above, state.consecutive_spikes < self._max_consecutive_skips)

    def next_state(
        self, state: SpikeState, norm: tf.Tensor, usable: tf.Tensor, is_above: tf.Tensor, is_skipped: tf.Tensor
    ) -> SpikeState:
        """Return the state after one step, with a norm in float64; a pure function of the state before it."""
        limit, before = self._max_consecutive_skips, state.consecutive_spikes
        consecutive = tf.where(usable, tf.where(is_above, tf.minimum(before + 1, limit), 0), before)
        reaches_limit = tf.logical_and(before < limit, tf.equal(consecutive, limit))
        is_applied = tf.logical_and(usable, tf.logical_not(is_skipped))
        # There is no logarithm of 0.
        is_stored = tf.logical_and(is_applied, norm > 0)
        count, length = state.spike_window_count, self._window_length
        is_here = tf.logical_and(is_stored, tf.equal(tf.range(length), count % length))
        following = tf.where(count + 1 < 2 * length, count + 1, length)
        return SpikeState(
            spike_window=tf.where(is_here, norm, state.spike_window),
            spike_window_count=tf.where(is_stored, following, count),
            consecutive_spikes=consecutive,
            lasting_changes=state.lasting_changes + tf.cast(reaches_limit, tf.int32),
        )


#: The standard deviation of a normal distribution, divided by its median distance from the median.
_DEVIATION_OF_NORMAL = 1.4826


def _median(values: tf.Tensor) -> tf.Tensor:
    ordered, length = tf.sort(values), values.shape[0]
    return (ordered[(length - 1) // 2] + ordered[length // 2]) / 2


def validated_spike_detector(detector: SpikeDetector | None) -> SpikeDetector | None:
    """Return the detector, or None; raise an error for any other object."""
    if detector is not None and not isinstance(detector, SpikeDetector):
        raise TypeError(
            f"skip_spikes must be a tfmp.SpikeDetector or None, got {detector!r} of type {type(detector).__name__}: "
            "pass tfmp.SpikeDetector(), or tfmp.SpikeDetector(max_norm=...) for a fixed bound."
        )
    return detector
