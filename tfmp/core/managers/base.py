"""The interface of all loss-scale managers, and what those share whose scale changes."""

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.step_counters import (
    NO_DIFFERENCE,
    NO_STEPS,
    LastDifference,
    LossScaleStatus,
    StepCounters,
    status_of,
)
from tfmp.core.storage.graph_variables import OncePerGraph
from tfmp.core.storage.state_variables import State, StateVariables
from tfmp.core.tensorflow_internals import at_top_level_of_graph
from tfmp.types import AddVariable, Done

_Value = TypeVar("_Value")


class Setting(Generic[_Value]):
    """An argument of a manager's constructor, which keeps it in an attribute with an underscore; others can read it."""

    def __set_name__(self, owner: "type[LossScaleManager]", name: str) -> None:
        self._name = name
        self.__doc__ = f"The argument `{name}` of the constructor, which cannot be changed."

    def __get__(self, manager: "LossScaleManager | None", owner: type) -> _Value:
        if manager is None:
            return self  # type: ignore[return-value] # as an attribute of the class, it is its documentation
        value: _Value = getattr(manager, f"_{self._name}")
        return value

    def __set__(self, manager: "LossScaleManager", value: object) -> None:
        raise settings.cannot_be_changed(self._name, value, type(manager).__name__)


class LossScaleManager(tf.Module, abc.ABC):
    """Base class of the managers, which decide the loss scale; the interface of tf.contrib's `LossScaleManager`.

    The optimizer multiplies each loss by `get_loss_scale()`, and after each step calls `update_loss_scale` with the
    answer to one question: were all gradients finite? Pass a manager to `tfmp.LossScaleOptimizer` or
    `tfmp.GradScaler`. Most scripts use `tfmp.ExponentialUpdateLossScaleManager`.

    To write a manager of your own, derive it from this class and override `get_loss_scale` and `update_loss_scale`.
    Keep values that change in TensorFlow variables, because the methods may be called only once, while a graph or a
    `tf.function` is built. This class counts the applied and skipped steps. Override `get_config` too if Keras is to
    save the manager with a model.

    Examples:
        >>> class AlwaysEight(LossScaleManager):
        ...     def get_loss_scale(self):
        ...         return tf.constant(8.0)
        ...     def update_loss_scale(self, finite_grads):
        ...         return tf.no_op()
        >>> float(AlwaysEight().get_loss_scale())
        8.0
    """

    #: True if `update_loss_scale` needs a second argument: the largest magnitude among the step's unscaled gradients.
    needs_max_abs: bool = False

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; managers of tfmp refuse a name that they do not have, such as a misspelled setting."""
        is_own = type(self).__module__.startswith("tfmp.")
        if is_own and not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(
                f"a {type(self).__name__} has no {name}, got {value!r}: its settings are arguments of the constructor. "
                "A subclass can have attributes of its own."
            )
        super().__setattr__(name, value)

    @abc.abstractmethod
    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar: a tensor to fetch in graph mode, an eager tensor in eager mode."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        """Adjust the loss scale after a step; the optimizer calls this method once per step.

        Args:
            finite_grads: A boolean scalar: were the gradients finite on every replica?

        Returns:
            The op that updates the manager's state; None in eager mode, as of each method that changes the state.
        """

    def set_loss_scale(self, loss_scale: float | tf.Tensor) -> tf.Operation:
        """Set the loss scale, a number or a scalar tensor; the next steps adjust the scale from there.

        Raises:
            NotImplementedError: The manager is no `tfmp.ExponentialUpdateLossScaleManager`, which alone supports this.
        """
        raise NotImplementedError(
            f"the scale of a {type(self).__name__} cannot be set: use a tfmp.ExponentialUpdateLossScaleManager."
        )

    def state_dict(self) -> dict[str, float]:
        """Return the state of eager mode as Python numbers by name, for example to save it as JSON.

        Examples:
            >>> import tfmp
            >>> tfmp.ExponentialUpdateLossScaleManager(8, incr_every_n_steps=2).state_dict()
            {'loss_scale': 8.0, 'good_steps': 0, 'bad_steps': 0}
        """
        state = self._state_to_save()
        return {} if state is None else state.numbers()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Restore the state of eager mode from what `state_dict` returned.

        Raises:
            TypeError: `state_dict` is not a mapping, or one of its values is not a number.
            ValueError: A name is missing or unknown, or a number is out of range. The state is then unchanged.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "state_dict must be a mapping from names to numbers, as state_dict() returns it, got "
                f"{state_dict!r} of type {type(state_dict).__name__}."
            )
        state = self._state_to_save()
        names = [] if state is None else list(state.numbers())
        if sorted(state_dict) != sorted(names):
            kept, given = (", ".join(each) or "nothing" for each in (names, state_dict))
            raise ValueError(
                f"a {type(self).__name__} keeps {kept}, got {given}: pass what state_dict() of the same kind of "
                "manager returned."
            )
        if state is not None:
            self._validate_state(state_dict)
            state.load(state_dict)

    def _validate_state(self, state_dict: Mapping[str, float]) -> None:
        """Raise an error if the rule cannot continue from these numbers; called before any of them is stored."""

    def _state_to_save(self) -> StateVariables[Any] | None:
        return None

    @property
    def lowest_loss_scale(self) -> float:
        """The lowest loss scale that the manager can reach; 0 if the manager does not know it.

        If this value is less than 1, the optimizer unscales gradients before it checks them: dividing by a scale less
        than 1 makes gradients larger, so a finite gradient could become infinite.
        """
        return 0.0

    @property
    def skips_per_backoff(self) -> int | None:
        """The number of consecutive skipped steps that lower the scale; None if it never shrinks or this is unknown."""
        return None

    def get_status(self) -> LossScaleStatus:
        """Return the loss scale and the step counters, for logs and monitoring: a NamedTuple of scalar tensors.

        Counting begins with the session, or with the eager program. The counters need no initializer, and are in no
        checkpoint, which has the variables of tf.contrib; Keras saves them with the optimizer. At the top level of a
        TF1 graph, each call returns the same tensors, which can be fetched after the graph is finalized.

        Examples:
            >>> import tfmp
            >>> status = tfmp.FixedLossScaleManager(128.0).get_status()
            >>> {tag: value.numpy().item() for tag, value in status._asdict().items()}
            {'loss_scale': 128.0, 'last_step_applied': True, 'last_step_finite': True, 'attempted_steps': 0,
             'applied_steps': 0, 'skipped_steps': 0, 'consecutive_skipped_steps': 0}
        """
        return self._status.get() if at_top_level_of_graph() else self._make_status()

    def note_step(self, applied: tf.Tensor, finite: tf.Tensor | None = None) -> tf.Operation:
        """Count a step as applied or skipped; the optimizer calls this method once per step.

        Args:
            applied: A boolean scalar: was the step applied?
            finite: A boolean scalar: did no gradient overflow? None if that is the same.
        """
        counters = self._counters.read()
        one_if_applied = tf.cast(applied, tf.int64)
        one_if_skipped = 1 - one_if_applied
        counters = StepCounters(
            applied_steps=counters.applied_steps + one_if_applied,
            skipped_steps=counters.skipped_steps + one_if_skipped,
            consecutive_skipped_steps=(counters.consecutive_skipped_steps + 1) * one_if_skipped,
            last_step_applied=applied,
        )
        counted = self._counters.assign(counters)
        if finite is None:
            return counted
        number = counters.applied_steps + counters.skipped_steps
        at_step = tf.where(tf.equal(finite, applied), NO_DIFFERENCE.at_step, number)
        return tf.group(counted, self._last_difference.assign(LastDifference(at_step)))

    def _step_counts(self) -> list[dict[str, float]]:
        """Return the counts of steps in eager mode, which `_load_step_counts` takes."""
        return [self._counters.numbers(), self._last_difference.numbers()]

    def _load_step_counts(self, counts: Sequence[Mapping[str, float]]) -> None:
        counters, last_difference = counts
        self._counters.load(counters)
        self._last_difference.load(last_difference)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; Keras saves them with a model.

        Raises:
            NotImplementedError: The manager is your own, and does not override this method.
        """
        classes = reversed(type(self).__mro__)
        names = [name for each in classes for name, value in vars(each).items() if isinstance(value, Setting)]
        if not names:
            raise NotImplementedError(f"{type(self).__name__} has no get_config, which saving a model needs.")
        return {name: getattr(self, f"_{name}") for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LossScaleManager":
        """Make a manager from what `get_config` returned."""
        return cls(**config)

    def __repr__(self) -> str:
        """Return the class with the settings that differ from their defaults and, in an eager program, the state."""
        try:
            config = settings.not_default(type(self), self.get_config())
        except NotImplementedError:
            config = {}
        # While a `tf.function` is traced, `tf.init_scope` returns to eager mode, where the variables have values.
        with tf.init_scope():
            state = self.state_dict() if tf.executing_eagerly() else {}
        shown, values = (", ".join(f"{name}={value!r}" for name, value in each.items()) for each in (config, state))
        return f"<{type(self).__name__}({shown}): {values}>" if values else f"<{type(self).__name__}({shown})>"

    def store_in(self, add_variable: AddVariable) -> None:
        """Move the state of eager mode into variables of a Keras optimizer, so that Keras saves them with the model.

        `tfmp.LossScaleOptimizer` calls this method with a function that makes a variable, given its name and its
        initial value.

        Raises:
            ValueError: Another optimizer already holds the state: each optimizer needs a manager of its own.
        """
        state = self._state_to_save()
        for each in (state, self._counters):
            if each is not None:
                each.store_in(add_variable)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # A SavedModel needs the counters, because its traced functions update them; a checkpoint must not contain
        # them. TensorFlow has no public way to distinguish the two, so this overrides a private method.
        counts = {"counters": self._counters, "last_difference": self._last_difference}
        return super()._trackable_children(save_type, **kwargs) | (counts if save_type == "savedmodel" else {})

    # Made on first use, not in a constructor: managers written for tf.contrib do not call `super().__init__()`.

    @functools.cached_property
    def _status(self) -> OncePerGraph[LossScaleStatus]:
        # A method, so that a copy of the manager asks itself.
        return OncePerGraph(self._make_status)

    def _make_status(self) -> LossScaleStatus:
        return status_of(self.get_loss_scale(), self._counters.read(), self._last_difference.read())

    @functools.cached_property
    def _counters(self) -> StateVariables[StepCounters]:
        return StateVariables(NO_STEPS, saved=False)

    @functools.cached_property
    def _last_difference(self) -> StateVariables[LastDifference]:
        # Not stored by the host: files that Keras saved have no place for it.
        return StateVariables(NO_DIFFERENCE, saved=False)


class StatefulManager(LossScaleManager, Generic[State]):
    """A manager whose rule changes a state; one field of the state is `loss_scale`, which stays within bounds."""

    #: The state of the rule, which the constructor of a derived class makes by `_start_from` from checked settings. The
    #: name is a part of the keys in a `tf.train.Checkpoint`.
    state: StateVariables[State] = None  # type: ignore[assignment] # never in a manager that is constructed

    def __init__(self, init_loss_scale: float, min_loss_scale: float, max_loss_scale: float) -> None:
        super().__init__()
        bounds = settings.loss_scale_bounds(init_loss_scale, min_loss_scale, max_loss_scale)
        # Python numbers of the same value: an eager op takes five times as long with a number of NumPy.
        self._init_loss_scale, self._min_loss_scale, self._highest = map(float, bounds)

    def _start_from(self, state: State) -> None:
        self._initial_state = state
        self.state = StateVariables(state, saved=True)
        self.state.create()

    @property
    def lowest_loss_scale(self) -> float:
        """The lowest loss scale that the manager can reach: `min_loss_scale`."""
        return self._min_loss_scale

    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar."""
        return self.state.get("loss_scale")

    @abc.abstractmethod
    def next_state(self, state: State, finite: tf.Tensor, *max_abs: tf.Tensor) -> State:
        """Return the state after one step, with the largest magnitude if the rule needs it: a pure function."""

    def update_loss_scale(self, finite_grads: tf.Tensor, *max_abs: tf.Tensor) -> tf.Operation:
        """Apply the rule after a step; the optimizer calls this method once per step."""
        # tf.contrib had a conditional here, whose name scope `cond` counts in the names of later ones: in a GAN, the
        # second Adam's variable is `cond_2/beta1_power` in every old checkpoint. A scope of this name keeps these keys.
        # The manager's own variables are made outside of it.
        state = self.state.read()
        with tf.name_scope("cond"):
            return self.state.assign(self.next_state(state, finite_grads, *max_abs))

    def _restart_with(self, **fields: Any) -> Done:  # noqa: ANN401 - numbers or tensors
        """Store the initial state with some of its fields replaced."""
        state = self._initial_state._replace(**fields)
        return self.state.assign(type(state)._make(map(tf.convert_to_tensor, state)))

    def _scale_within_bounds(self, scale: tf.Tensor) -> tf.Tensor:
        """Return a restored scale, moved to the nearer bound if it lies outside; NaN becomes `init_loss_scale`."""
        # `tf.maximum` and `tf.minimum` do not replace NaN, so it is handled separately.
        within = tf.minimum(tf.maximum(scale, self._min_loss_scale), self._highest)
        return tf.where(tf.math.is_nan(scale), self._init_loss_scale, within)

    def _state_to_save(self) -> StateVariables[State]:
        return self.state
