"""Lays out a Keras front-end in checkpoints like the optimizer that it wraps, and reads the layouts of other wrappers.

`tf.train.Checkpoint` saves a graph of objects. An optimizer is an object whose children depend on who saved it:

    no wrapper               _variables/0, 1, ...  _iterations  _learning_rate  _momentums  and so on
    tfmp                     the same, and  _variables/state_0, state_1, ...  _loss_scale_manager
    Keras 2's own wrapper    the same, and  loss_scale/{current_loss_scale, good_steps}
    Keras 3's own wrapper    inner_optimizer, with the same;  _variables, its own;  dynamic_scale  step_counter
    tfmp 0.2 and earlier     inner_optimizer or _inner_optimizer, likewise;  _variables, its own;  _loss_scale_manager

So a run without loss scaling goes on with tfmp, and back. The layouts with `inner_optimizer` are called nested here. A
restore visits the children of an object in the order in which they were saved, and then theirs. So it comes to those of
`_variables` after `inner_optimizer`. TensorFlow has no public way to choose the names in a checkpoint; Keras 2's own
wrapper overrides the same private methods.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.core.managers import FixedLossScaleManager, LossScaleManager, dynamic_manager
from tfmp.core.storage.state_variables import InCheckpoint

_logger = logging.getLogger("tfmp")


class CheckpointedAsInner:
    """The methods of a Keras front-end that TensorFlow's checkpoints call."""

    # The first two come from the front-end, the third from TensorFlow.
    inner_optimizer: Any
    _loss_scale_manager: LossScaleManager
    _update_uid: int

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        own = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc] # TensorFlow's
        kept = {name: child for name, child in own.items() if name not in {*_NESTED, *_OF_ANY_OPTIMIZER}}
        inner = self.inner_optimizer._trackable_children(save_type, **kwargs)
        return {**kept, **inner, _VARIABLES: self._checkpointed_variables}

    def _lookup_dependency(self, name: str, cached_dependencies: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
        if cached_dependencies is None:
            # TensorFlow asks, before it tracks an attribute of the wrapper itself.
            return super()._lookup_dependency(name)  # type: ignore[misc] # TensorFlow's
        if name in _NESTED:
            self._checkpointed_variables.nested_in = self._update_uid
            return self.inner_optimizer
        if name in _OF_ANY_OPTIMIZER and name in super()._trackable_children():  # type: ignore[misc] # TensorFlow's
            # It is restored as one of `_variables`, when it is known whose it is.
            return None
        if name in self._scale_of_keras:
            return self._scale_of_keras[name]
        return cached_dependencies.get(name)

    @property
    def _deferred_dependencies(self) -> "_Deferred":
        # What only `build` makes is restored then.
        return _Deferred(lambda name: None if name in _OF_ANY_OPTIMIZER else (self.inner_optimizer, name))

    @functools.cached_property
    def _checkpointed_variables(self) -> "_Variables":
        own = super()._trackable_children()[_VARIABLES]  # type: ignore[misc] # TensorFlow's
        return _Variables(own, self.inner_optimizer, lambda: self._update_uid)

    @functools.cached_property
    def _scale_of_keras(self) -> dict[str, tf.Module]:
        # Only restored, never saved.
        scale = ScaleOfKeras(self._loss_scale_manager)
        return {"loss_scale": scale, "dynamic_scale": scale.current_loss_scale, "step_counter": scale.good_steps}


_VARIABLES = "_variables"
#: The wrapped optimizer: in Keras 3, where its own wrapper has the same name for it, and in Keras 2.
_NESTED = ("inner_optimizer", "_inner_optimizer")
#: What Keras makes for every optimizer, and a wrapper does not use.
_OF_ANY_OPTIMIZER = ("_iterations", "_learning_rate")
#: Before the position of a variable of the wrapper in its own list.
_STATE = "state_"


class _Variables(tf.Module):
    """In checkpoints, the list of the wrapped optimizer's variables, to which the wrapper's `own` are added."""

    def __init__(self, own: Any, inner_optimizer: Any, current_restore: Callable[[], int]) -> None:  # noqa: ANN401
        super().__init__()
        self._own = own
        self._inner_optimizer = inner_optimizer
        self._current_restore = current_restore
        # The number of the last restore from a nested layout; `current_restore` returns that of the last of all.
        self.nested_in: int | None = None

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        own = self._own._trackable_children(save_type, **kwargs)
        inner = self._inner_optimizer._trackable_children()[_VARIABLES]._trackable_children(save_type, **kwargs)
        return {**inner, **{_STATE + name: variable for name, variable in own.items()}}

    def _lookup_dependency(self, name: str, cached_dependencies: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
        if cached_dependencies is None:
            return super()._lookup_dependency(name)
        return cached_dependencies.get(_STATE + name if self._is_nested else name)

    @property
    def _is_nested(self) -> bool:
        return self.nested_in == self._current_restore()

    @property
    def _deferred_dependencies(self) -> "_Deferred":
        # The lists restore variables when these are appended.
        return _Deferred(self._list_and_position)

    def _list_and_position(self, name: str) -> tuple[Any, str]:
        if self._is_nested or name.startswith(_STATE):
            return self._own, name.removeprefix(_STATE)
        return self._inner_optimizer._trackable_children()[_VARIABLES], name


class _Deferred:
    """In place of the dictionary of what a restored object does not have yet: hands each part on to another object.

    `place` returns the object that will have a part, and the part's name there; None if none will.
    """

    def __init__(self, place: Callable[[str], tuple[Any, str] | None]) -> None:
        self._place = place

    def setdefault(self, name: str, positions: list[Any]) -> list[Any]:
        """Return the list of a part's positions in checkpoints, to which TensorFlow adds one."""
        place = self._place(name)
        if place is None:
            return positions
        owner, name_there = place
        waiting: list[Any] = owner._deferred_dependencies.setdefault(name_there, positions)
        return waiting

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as of a dictionary
        """Return `default`: nothing is kept here."""
        return default

    pop = get


def continue_at(manager: LossScaleManager, loss_scale: float, good_steps: int) -> None:
    """Let a manager continue from the scale and the count of Keras' own wrapper, if it has `continue_from`; or warn."""
    continue_from = getattr(manager, "continue_from", None)
    if continue_from is not None:
        continue_from(loss_scale, good_steps)
    elif float(manager.get_loss_scale()) != loss_scale:
        # Around a legacy optimizer, this manager's own checkpoints have the scale here too.
        _logger.warning(
            "the loss scale %g of Keras' own LossScaleOptimizer is not taken over: %s has no method continue_from.",
            loss_scale,
            type(manager).__name__,
        )


def manager_from_keras(optimizer: Any) -> LossScaleManager:  # noqa: ANN401 - of any Keras
    """Return a manager that goes on where Keras' own wrapper stopped."""
    # Keras' own scale can reach 0.
    scale = float(np.clip(optimizer.initial_scale, 1, np.finfo(np.float32).max))
    if not getattr(optimizer, "dynamic", True):
        return FixedLossScaleManager(scale)
    manager = dynamic_manager(scale, optimizer.dynamic_growth_steps)
    # The names of Keras 3, which has them once the optimizer is built, and of Keras 2.
    for name, count in (("dynamic_scale", "step_counter"), ("loss_scale", "dynamic_counter")):
        if hasattr(optimizer, name):
            continue_at(manager, float(getattr(optimizer, name).numpy()), int(getattr(optimizer, count).numpy()))
    return manager


class ScaleOfKeras(tf.Module):
    """Holds a manager's scale and count of finite steps in checkpoints as Keras' own wrappers do, and restores them."""

    def __init__(self, manager: LossScaleManager) -> None:
        super().__init__()
        restored: dict[str, tf.Tensor] = {}

        def restore(name: str, value: tf.Tensor) -> None:
            restored[name] = value
            if len(restored) == 2:
                continue_at(manager, float(restored.pop("loss_scale")), int(restored.pop("good_steps")))

        def good_steps() -> tf.Tensor:
            return tf.constant(int(manager.state_dict().get("good_steps", 0)), tf.int64)

        # The names in the `loss_scale` of Keras 2's own wrappers.
        self.current_loss_scale = InCheckpoint(manager.get_loss_scale, functools.partial(restore, "loss_scale"))
        self.good_steps = InCheckpoint(good_steps, functools.partial(restore, "good_steps"))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # Not in a SavedModel: its graphs of these functions have no numbers.
        is_readable = save_type == "checkpoint" and tf.executing_eagerly()
        return super()._trackable_children(save_type, **kwargs) if is_readable else {}
