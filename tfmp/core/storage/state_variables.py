"""Keep a NamedTuple of numbers in variables: one set for each graph, one for eager code."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfmp.core.storage import graph_variables
from tfmp.core.storage.graph_registry import OncePerGraph
from tfmp.types import AddVariable

State = TypeVar("State", bound=NamedTuple)
Kept = TypeVar("Kept")


class _InGraph(NamedTuple):
    """What a graph holds of a state.

    Attributes:
        variables: One for each field.
        values: A read of them that stands outside everything, to be fetched also when the graph is final.
    """

    variables: Any
    values: Any


class StateVariables(tf.Module, Generic[State]):
    """The storage of one state.

    Args:
        initial: The state to start from: a NamedTuple of NumPy scalars, or of arrays.
        saved: In a graph, whether the variables are initialised and saved as a script's own are. Otherwise no
            initializer and no Saver knows of them, and every session starts from the initial state.
    """

    def __init__(self, initial: State, saved: bool) -> None:
        super().__init__()
        self._initial = initial
        self._saved = saved
        self._in_graph = OncePerGraph(self._make_in_graph)
        #: The variables of eager code. The name stands in the keys of `tf.train.Checkpoint`.
        self.values: State | None = None
        self._hosted = False

    def store_in(self, add_variable: AddVariable) -> None:
        """Keep the eager state in variables that a host makes, from its present values on.

        Args:
            add_variable: The host's; what it makes, the host saves.

        Raises:
            ValueError: The state is kept by a host already.
        """
        if self._hosted:
            raise ValueError(
                "the loss-scale manager keeps its state in another Keras optimizer already: make a manager for each."
            )
        with tf.init_scope():
            present = self._like(value.numpy() for value in self._read(self.create()))
            self.values = self._make(add_variable, present)
            self._hosted = True

    def create(self) -> State:
        """Return the variables of the current context, making them on the first call."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                return self._in_graph.get().variables
            if self.values is None:
                self.values = _outside_of_functions(lambda: self._make(_add_eager_variable, self._initial))
            return self.values

    def read(self) -> State:
        """Return the state as tensors.

        In a graph, where nothing says when to read, these are the same tensors at every call: a loop that asks again
        and again does not grow the graph. Under control dependencies and in conditionals they are read anew.
        """
        variables = self.create()
        if graph_variables.at_top_level_of_graph():
            return self._in_graph.get().values
        return self._read(variables)

    def assign(self, state: State) -> tf.Operation:
        """Store a state, each field once all of them are computed.

        Args:
            state: The new state, as tensors. They must be new values: a reference variable's read shares
                the variable's memory.

        Returns:
            The op that stores it; None in eager code.
        """
        variables = self.create()
        with tf.control_dependencies(list(state)):
            return tf.group(*(variable.assign(value) for variable, value in zip(variables, state, strict=True)))

    def numbers(self) -> dict[str, float]:
        """Return the state of eager code as Python's numbers, by the names of the fields; of scalars only."""
        with tf.init_scope():
            return {name: value.numpy().item() for name, value in self._read(self.create())._asdict().items()}

    def load(self, numbers: Mapping[str, float]) -> None:
        """Set the state of eager code.

        Args:
            numbers: A number for each field, by its name.
        """
        with tf.init_scope():
            variables = self.create()
            # All before the first is stored: one may be no number.
            values = [np.array(numbers[name], initial.dtype) for name, initial in self._initial._asdict().items()]
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _make_in_graph(self) -> _InGraph:
        add = graph_variables.add_saved_variable if self._saved else graph_variables.add_transient_variable
        variables = self._make(add, self._initial)
        return _InGraph(variables, self._read(variables))

    def _make(self, add_variable: AddVariable, initial: State) -> State:
        return self._like(add_variable(name, value) for name, value in zip(initial._fields, initial, strict=True))

    def _read(self, variables: State) -> State:
        def read_variables() -> State:
            return self._like(variable.read_value() for variable in variables)

        if self._saved or tf.compat.v1.executing_eagerly_outside_functions():
            return read_variables()
        initialized = tf.reduce_all([variable.is_initialized() for variable in variables])
        # Named, since names of the form `cond_2` count in old checkpoints' keys.
        return tf.cond(initialized, read_variables, lambda: self._like(map(tf.constant, self._initial)), name="read")

    def _like(self, values: Iterable[Any]) -> State:
        return type(self._initial)._make(values)


def _outside_of_functions(make: Callable[[], Kept]) -> Kept:
    """Make variables eagerly, also while a `tf.function` is traced.

    What is made in its first trace has TensorFlow trace it twice, and what is made in a later one is an error: its
    graph makes all variables, under `tf.init_scope` too. A thread of its own has no graph.
    """
    if not tf.compat.v1.get_default_graph().building_function:
        return make()
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    made: list[Kept] = []

    def run() -> None:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            made.append(make())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]


class NotCheckpointed(tf.Module):
    """Holds variables that no checkpoint has, for they belong to a program and not to a training.

    A SavedModel has them: the functions that it holds use them.
    """

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # Private, for want of a public way to be in a SavedModel and in no checkpoint.
        return super()._trackable_children(save_type, **kwargs) if save_type == "savedmodel" else {}


def _add_eager_variable(name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
    return tf.Variable(initial_value, name=name, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
