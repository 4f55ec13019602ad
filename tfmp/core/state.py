"""Keep a NamedTuple of scalars in variables: one set for each graph, one for eager code."""

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfmp.core import graph_variables
from tfmp.types import AddVariable

State = TypeVar("State", bound=NamedTuple)


class StateVariables(tf.Module, Generic[State]):
    """The storage of one state.

    A manager may be made in one graph and used in another: Estimator builds a graph of its own for every call of
    `train`, and a manager may stand at the top of a script. So each graph gets its own variables when it first
    asks, outside any control context. They live in the graph, in a collection whose key is this object: they go
    when the graph goes, and TensorFlow exports no collection whose key is not a string.

    Args:
        initial: The state to start from: a NamedTuple of NumPy scalars.
        saved: In a graph, whether the variables are initialised and saved as a script's own are. Otherwise no
            initializer and no Saver knows of them, and every session starts from the initial state.
    """

    def __init__(self, initial: State, saved: bool) -> None:
        super().__init__()
        self._initial = initial
        self._saved = saved
        self._eager_variables: State | None = None

    def create(self) -> State:
        """Return the variables of the current context, making them on the first call."""
        with tf.init_scope():
            if tf.executing_eagerly():
                if self._eager_variables is None:
                    self._eager_variables = self._make(_add_eager_variable)
                return self._eager_variables
            held = tf.compat.v1.get_collection_ref(self)
            if not held:
                add = graph_variables.add_saved_variable if self._saved else graph_variables.add_transient_variable
                # Replicas build in lockstep: each of them comes here before the first has stored what all share.
                held[:] = [self._make(add)]
            return held[0]

    def read(self) -> State:
        """Return the state as scalar tensors."""
        variables = self.create()

        def read_variables() -> State:
            return self._like(variable.read_value() for variable in variables)

        if self._saved:
            return read_variables()
        initialized = tf.reduce_all([variable.is_initialized() for variable in variables])
        # Named, since names of the form `cond_2` count in old checkpoints' keys.
        return tf.cond(initialized, read_variables, lambda: self._like(map(tf.constant, self._initial)), name="read")

    def assign(self, state: State) -> tf.Operation:
        """Store a state, each field once all of them are computed.

        Args:
            state: The new state, as scalar tensors. They must be new values: a reference variable's read shares
                the variable's memory.

        Returns:
            The op that stores it; None in eager code.
        """
        variables = self.create()
        with tf.control_dependencies(list(state)):
            return tf.group(*(variable.assign(value) for variable, value in zip(variables, state, strict=True)))

    def _make(self, add_variable: AddVariable) -> State:
        return self._like(
            add_variable(name, value) for name, value in zip(self._initial._fields, self._initial, strict=True)
        )

    def _like(self, values: Iterable[Any]) -> State:
        return type(self._initial)._make(values)


def _add_eager_variable(name: str, initial_value: np.generic) -> tf.Variable:
    return tf.Variable(initial_value, name=name, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
