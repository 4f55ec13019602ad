"""Stores a NamedTuple of numbers in variables: one set of variables for each graph, and one for eager code."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfmp.core.storage import graph_variables
from tfmp.core.storage.graph_registry import OncePerGraph
from tfmp.core.storage.in_checkpoint import InCheckpoint
from tfmp.core.tracing import in_thread_without_graph
from tfmp.types import AddVariable, Done

State = TypeVar("State", bound=NamedTuple)


class _Stored(NamedTuple):
    """A state that is stored in one graph, or in eager code."""

    #: The variables, one for each field.
    variables: Any
    #: Tensors that read the variables, at the top level of the graph. They can be fetched in every iteration, also
    #: after the graph was finalized. None in eager code.
    values: Any = None
    #: Holds the variables in a `tf.train.Checkpoint` of the graph.
    in_checkpoint: Any = None


class StateVariables(tf.Module, Generic[State]):
    """Stores one state: in variables of each graph that uses it, and in variables of eager code.

    `initial` is a NamedTuple of NumPy scalars or arrays. If `saved` is True, the variables in a graph are initialized
    and saved with the script's own variables. If it is False, they are in no collection and no checkpoint, and every
    session starts from the initial state.
    """

    def __init__(self, initial: State, saved: bool) -> None:
        super().__init__()
        self._initial = initial
        self._saved = saved
        self._in_graph = OncePerGraph(self._make_in_graph)
        #: The variables of eager code. This attribute's name is a part of the keys in a `tf.train.Checkpoint`.
        self.values: State | None = None
        #: True if the state of eager code is in variables of a host.
        self.is_hosted = False

    def store_in(self, add_variable: AddVariable) -> None:
        """Move the state of eager code, with its current values, into variables of a host that saves them.

        The host is for example a Keras optimizer. A state that is already in variables of a host is refused.
        """
        if self.is_hosted:
            raise ValueError(
                "the loss-scale manager keeps its state in another Keras optimizer already: make a manager for each."
            )
        with tf.init_scope():
            present = self._initial
            if self.values is not None:
                present = self._like(graph_variables.value_of(variable).numpy() for variable in self.values)
            self.values = self._make(add_variable, present)
            self.is_hosted = True

    def create(self) -> State:
        """Return the variables of the current graph, or of eager code; make them on the first call."""
        return self._here().variables

    def _here(self) -> _Stored:
        with tf.init_scope():
            if not tf.executing_eagerly():
                return self._in_graph.get()
            if self.values is None:
                # While a function is traced, its graph would make the variables.
                is_traced = tf.compat.v1.get_default_graph().building_function
                self.values = in_thread_without_graph(self._make_eager) if is_traced else self._make_eager()
            return _Stored(self.values)

    def in_graph(self) -> list[tf.Variable]:
        """Return the variables that were made in the current graph; none in eager code."""
        made = self._in_graph.made()
        return [] if made is None else list(made.variables)

    def read(self) -> State:
        """Return the state as tensors.

        At the top level of a graph, every call returns the same tensors, so that a loop that calls this method does not
        add ops to the graph. Under control dependencies and in conditionals, where the time of the read matters, every
        call adds new ops that read the variables.
        """
        here = self._here()
        return here.values if graph_variables.at_top_level_of_graph() else self._read(here.variables)

    def get(self, field: str) -> tf.Tensor:
        """Return one field of the state, as `read` returns it, without reading the others."""
        here = self._here()
        if graph_variables.at_top_level_of_graph():
            return getattr(here.values, field)
        if self._is_initialized():
            return graph_variables.value_of(getattr(here.variables, field))
        return getattr(self._read(here.variables), field)

    def _is_initialized(self) -> bool:
        """Return whether the variables certainly have values when they are read."""
        return self._saved or tf.compat.v1.executing_eagerly_outside_functions()

    def assign(self, state: State) -> Done:
        """Store a state; no field is stored before all fields are computed."""
        variables = self.create()
        with tf.control_dependencies(list(state)):
            return tf.group(*(variable.assign(value) for variable, value in zip(variables, state, strict=True)))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # A `tf.train.Checkpoint` in a graph, as `model_to_estimator` has it, holds the variables of that graph under
        # the names that those of eager code have.
        if not self._saved and save_type != "savedmodel":
            return {}
        with tf.init_scope():
            if self._saved and not tf.executing_eagerly():
                return dict(self._in_graph.get().in_checkpoint._trackable_children(save_type, **kwargs))
        return dict(super()._trackable_children(save_type, **kwargs))

    def numbers(self) -> dict[str, float]:
        """Return the state of eager code as Python numbers, by the names of the fields; all fields must be scalars."""
        with tf.init_scope():
            return {name: value.numpy().item() for name, value in self._read(self.create())._asdict().items()}

    def load(self, numbers: Mapping[str, float]) -> None:
        """Set the state of eager code from a number for each field, by the name of the field."""
        with tf.init_scope():
            variables = self.create()
            # All values are converted before the first is stored: if one is not a number, nothing changes.
            values = [np.array(numbers[name], initial.dtype) for name, initial in self._initial._asdict().items()]
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _make_in_graph(self) -> _Stored:
        add = graph_variables.add_saved_variable if self._saved else graph_variables.add_transient_variable
        variables = self._make(add, self._initial)
        in_checkpoint = tf.Module()
        in_checkpoint.values = self._like(map(_in_checkpoint_of_graph, variables, self._initial))
        return _Stored(variables, self._read(variables), in_checkpoint)

    def _make_eager(self) -> State:
        return self._make(graph_variables.add_eager_variable, self._initial)

    def _make(self, add_variable: AddVariable, initial: State) -> State:
        return self._like(add_variable(name, value) for name, value in zip(initial._fields, initial, strict=True))

    def _read(self, variables: State) -> State:
        def read_variables() -> State:
            return self._like(map(graph_variables.value_of, variables))

        if self._is_initialized():
            return read_variables()
        initialized = tf.reduce_all([variable.is_initialized() for variable in variables])
        # The conditional has a name of its own. Without one it would take a name such as `cond_2`, and then other
        # conditionals, whose names are part of the keys in old checkpoints, would get other numbers.
        return tf.cond(initialized, read_variables, lambda: self._like(map(tf.constant, self._initial)), name="read")

    def _like(self, values: Iterable[Any]) -> State:
        return type(self._initial)._make(values)


def _in_checkpoint_of_graph(variable: tf.Variable, initial: np.generic | np.ndarray) -> InCheckpoint:
    """Return a variable of a graph as a checkpoint holds it, which may be saved before a session initializes it."""

    def read() -> tf.Tensor:
        is_initialized = tf.compat.v1.is_variable_initialized(variable)
        return tf.cond(is_initialized, variable.read_value, lambda: tf.constant(initial))

    return InCheckpoint(read, lambda value: variable.assign(value).op)
