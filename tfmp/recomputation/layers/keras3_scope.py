"""A scope of Keras 3 in which variables do not change, and which knows what would have changed."""

from collections.abc import Sequence

import keras
import tensorflow as tf


class NotingScope(keras.StatelessScope):
    """A scope that knows which variables were used and assigned to in it; Keras' own only knows their values.

    `state` has variables and the values that they have in the scope.

    Examples:
        >>> own, other = keras.Variable(1.0), keras.Variable(2.0)
        >>> with NotingScope([(own, tf.constant(3.0))]) as scope:
        ...     _ = other.assign(own + other)
        >>> [float(value) for _, value in scope.updates], float(other)
        ([5.0], 2.0)
        >>> list(scope.borrowed.values()) == [other]
        True
    """

    def __init__(self, state: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        super().__init__(state, collect_losses=True)
        #: The variables that are not among the given ones, by their `id`.
        self.borrowed: dict[int, keras.Variable] = {}
        self._assigned: dict[int, keras.Variable] = {}

    @property
    def updates(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The variables that were assigned to, each with its new value."""
        return [(variable, self.get_current_value(variable)) for variable in self._assigned.values()]

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Note an assignment, which Keras passes on."""
        variable, value = update
        self.get_current_value(variable)
        self._assigned[id(variable)] = variable
        # Where the layer reads the variable again, no gradient flows to what was assigned to it.
        super().add_update((variable, tf.stop_gradient(value)))

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Return the value that a variable has in the scope; None if it is the one outside of the scope."""
        value = super().get_current_value(variable)
        if value is None:
            self.borrowed[id(variable)] = variable
        return value
