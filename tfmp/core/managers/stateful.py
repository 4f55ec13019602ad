"""The base class of the managers whose scale changes: the bounds of the scale, and the state of the rule."""

from collections.abc import Callable
from typing import Any, Generic

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager
from tfmp.core.storage.state_variables import State, StateVariables
from tfmp.types import AddVariable, Done


class StatefulManager(LossScaleManager, Generic[State]):
    """A manager whose rule changes a state; one field of the state is `loss_scale`, which stays within bounds.

    The constructor of a derived class checks its settings and then calls `_start_from`, which makes the variables.
    """

    #: The state of the rule; `_start_from` makes it.
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

    def _update(self, rule: Callable[[State], State]) -> Done:
        """Store the state that the rule computes from the present one."""
        # tf.contrib had a conditional here, whose name scope `cond` counts in the names of later ones: in a GAN, the
        # second Adam's variable is `cond_2/beta1_power` in every old checkpoint. A scope of this name keeps these keys.
        # The manager's own variables are created before, outside of it.
        self.state.create()
        with tf.name_scope("cond"):
            return self.state.assign(rule(self.state.read()))

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

    def store_in(self, add_variable: AddVariable) -> None:
        """Move the state of the rule, as well as the step counters, into variables of a Keras optimizer."""
        self.state.store_in(add_variable)
        super().store_in(add_variable)
