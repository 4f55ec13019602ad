"""The interface of all loss-scale managers."""

import abc
import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfmp.core.graph_registry import OncePerGraph
from tfmp.core.state import StateVariables
from tfmp.core.step_counters import (
    NO_DROP,
    NO_STEPS,
    LastDrop,
    LossScaleStatus,
    StepCounters,
    next_counters,
    status_of,
)
from tfmp.types import AddVariable


class LossScaleManager(tf.Module, abc.ABC):
    """Decides the loss scale; the interface of `tf.contrib.mixed_precision.LossScaleManager`.

    A manager of your own overrides `get_loss_scale` and `update_loss_scale`, and is then taken wherever the ones
    here are. Counting steps is done for it.

    Example:
        >>> class AlwaysEight(LossScaleManager):
        ...     def get_loss_scale(self):
        ...         return tf.constant(8.0)
        ...     def update_loss_scale(self, finite_grads):
        ...         return tf.no_op()
        >>> float(AlwaysEight().get_loss_scale())
        8.0
    """

    #: Whether `update_loss_scale` also takes the largest magnitude among the step's gradients, its second argument.
    needs_max_abs: bool = False

    @abc.abstractmethod
    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar: a tensor to fetch in graph mode, a value in eager mode."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        """Take note of a step.

        Args:
            finite_grads: A boolean scalar, whether the gradients were finite on every replica.

        Returns:
            The op that does it; None in eager mode.
        """

    def set_loss_scale(self, loss_scale: float | tf.Tensor) -> tf.Operation:
        """Set the scale, from which the rule goes on; for a rule that can be overruled.

        Args:
            loss_scale: The scale.

        Returns:
            The op that sets it; None in eager mode.

        Raises:
            NotImplementedError: The rule alone decides the scale.
        """
        raise NotImplementedError(
            f"the scale of a {type(self).__name__} cannot be set: use a tfmp.ExponentialUpdateLossScaleManager."
        )

    def state_dict(self) -> dict[str, float]:
        """Return the state that eager code keeps, as numbers; empty for a rule that keeps none.

        Example:
            >>> import tfmp
            >>> tfmp.ExponentialUpdateLossScaleManager(8, incr_every_n_steps=2).state_dict()
            {'loss_scale': 8.0, 'good_steps': 0, 'bad_steps': 0}
        """
        state = self._state_to_save()
        return {} if state is None else state.numbers()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Set the state of eager code to what `state_dict` returned.

        Args:
            state_dict: The numbers, by their names.

        Raises:
            TypeError: It is no mapping, or one is no number.
            ValueError: Some are missing, not known or out of range; then the state stays as it was.
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
                f"a {type(self).__name__} keeps {kept}, got {given}: load what the state_dict of the same kind of "
                "manager returned."
            )
        if state is not None:
            self._validate_state(state_dict)
            state.load(state_dict)

    def _validate_state(self, state_dict: Mapping[str, float]) -> None:
        """Say so if numbers are none that the rule can go on from, before any of them is taken."""

    def _state_to_save(self) -> StateVariables[Any] | None:
        return None

    @property
    def lowest_loss_scale(self) -> float:
        """The scale that the manager never goes below; 0 if it does not say.

        Where it is less than 1 gradients are unscaled before they are checked: that could make them infinite.
        """
        return 0.0

    @property
    def skips_per_backoff(self) -> int | None:
        """After how many skipped steps in a row the scale shrinks; None if it never does, or is not known."""
        return None

    def get_status(self) -> LossScaleStatus:
        """Return the loss scale, and how many steps were applied and skipped, as monitors show them.

        The counts begin with the session, or the eager program. They need no initializer and are in no checkpoint,
        which holds what tf.contrib's held and no more; Keras saves them with the optimizer.

        At the top level of a graph every call returns the same tensors, which can be fetched also when the graph is
        final. Under control dependencies, in conditionals, in a `tf.function` and in eager code they are read anew.

        Returns:
            A `LossScaleStatus` of scalars.

        Example:
            >>> import tfmp
            >>> status = tfmp.FixedLossScaleManager(128.0).get_status()
            >>> {tag: value.numpy().item() for tag, value in status._asdict().items()}
            {'loss_scale': 128.0, 'last_step_applied': True, 'last_step_finite': True, 'attempted_steps': 0,
             'applied_steps': 0, 'skipped_steps': 0, 'consecutive_skipped_steps': 0}
        """
        return self._status.read()

    def get_step_outcomes(self) -> LossScaleStatus:
        """Return `get_status()`; the name of tfmp 0.1, which will be removed."""
        warnings.warn("get_step_outcomes is deprecated: call get_status.", DeprecationWarning, stacklevel=2)
        return self.get_status()

    def note_step(self, applied: tf.Tensor, finite: tf.Tensor | None = None) -> tf.Operation:
        """Count a step; the optimizer calls it beside `update_loss_scale`.

        Args:
            applied: A boolean scalar: was the step applied?
            finite: A boolean scalar: did no gradient overflow? None if that is the same.

        Returns:
            The op that counts it; None in eager mode.
        """
        counters = next_counters(self._counters.read(), applied)
        counted = self._counters.assign(counters)
        if finite is None:
            return counted
        number = counters.applied_steps + counters.skipped_steps
        return tf.group(counted, self._last_drop.assign(LastDrop(tf.where(finite, NO_DROP.at_step, number))))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, as Keras saves them with a model.

        Raises:
            NotImplementedError: The class does not say; a manager of your own overrides this to be saved.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_config, which saving a model needs.")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LossScaleManager":
        """Make a manager from what `get_config` returned.

        Args:
            config: The constructor's arguments.
        """
        return cls(**config)

    def __repr__(self) -> str:
        """Show the settings that differ from their defaults and, in an eager program, the state."""
        shown = f"{type(self).__name__}({', '.join(self._settings_to_show())})"
        with tf.init_scope():
            state = self.state_dict() if tf.executing_eagerly() else {}
        values = ", ".join(f"{name}={value!r}" for name, value in state.items())
        return f"<{shown}: {values}>" if values else f"<{shown}>"

    def _settings_to_show(self) -> list[str]:
        try:
            config = self.get_config()
        except NotImplementedError:
            return []
        parameters = inspect.signature(type(self)).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        return [f"{name}={value!r}" for name, value in config.items() if value != defaults.get(name)]

    def store_in(self, add_variable: AddVariable) -> None:
        """Keep the eager state in variables that a host makes: Keras saves those of its optimizers.

        Args:
            add_variable: Makes a variable from its name and its initial value, a NumPy scalar.

        Raises:
            ValueError: Another host keeps the state already.
        """
        self._counters.store_in(add_variable)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # Private, for want of a public way to be in a SavedModel, whose functions count steps, and in no checkpoint.
        children = super()._trackable_children(save_type, **kwargs)
        return (
            children | {"counters": self._counters, "last_drop": self._last_drop}
            if save_type == "savedmodel"
            else children
        )

    @functools.cached_property
    def _status(self) -> OncePerGraph[LossScaleStatus]:
        return OncePerGraph(self._make_status)

    def _make_status(self) -> LossScaleStatus:
        return status_of(self.get_loss_scale(), self._counters.read(), self._last_drop.read())

    # Made on first use: the managers that users wrote for tf.contrib never call this class' constructor.

    @functools.cached_property
    def _counters(self) -> StateVariables[StepCounters]:
        return StateVariables(NO_STEPS, saved=False)

    @functools.cached_property
    def _last_drop(self) -> StateVariables[LastDrop]:
        # Not stored by the host: files that Keras saved have no place for it.
        return StateVariables(NO_DROP, saved=False)


def validated_manager(manager: LossScaleManager, name: str = "loss_scale_manager") -> LossScaleManager:
    """Return the manager, or say that it is none.

    Args:
        manager: What the user gave as a manager.
        name: The argument's name, for the error.

    Raises:
        TypeError: It is not one.
    """
    if not isinstance(manager, LossScaleManager):
        raise TypeError(
            f"{name} must be a tfmp.LossScaleManager, got {manager!r} of type "
            f"{type(manager).__name__}: for a constant scale pass tfmp.FixedLossScaleManager(scale)."
        )
    return manager
