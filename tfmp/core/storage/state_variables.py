"""Keeps numbers in variables, a set of them for each graph and for eager code, and decides what checkpoints hold."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfmp.core.storage.graph_variables import (
    SAME_ON_ALL_REPLICAS,
    OncePerGraph,
    add_saved_variable,
    add_transient_variable,
    value_of,
)
from tfmp.core.tensorflow_internals import at_top_level_of_graph
from tfmp.core.tracing import outside_of_functions
from tfmp.types import AddVariable, Done

State = TypeVar("State", bound=NamedTuple)
Kept = TypeVar("Kept")


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
        # The variables in a graph, and what they read as at its top level.
        self._in_graph = OncePerGraph(self._make_in_graph)
        self._in_checkpoint_of_graph = OncePerGraph(self._make_in_checkpoint)
        #: The variables of eager code. This attribute's name is a part of the keys in a `tf.train.Checkpoint`.
        self.values: State | None = None
        #: True if the state of eager code is in variables of a host.
        self.is_hosted = False

    def store_in(self, add_variable: AddVariable) -> None:
        """Move the state of eager code, once, into variables of a host that saves them, such as a Keras optimizer."""
        if self.is_hosted:
            raise ValueError(
                "the loss-scale manager keeps its state in another Keras optimizer already: make a manager for each."
            )
        with tf.init_scope():
            present = self._initial
            if self.values is not None:
                present = present._make(value_of(variable).numpy() for variable in self.values)
            self.values = present._make(map(add_variable, present._fields, present))
            self.is_hosted = True

    def create(self) -> State:
        """Return the variables of the current graph, or of eager code; make them on the first call."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                return self._in_graph.get()[0]
            if self.values is None:
                initial = self._initial
                self.values = outside_of_functions(
                    lambda: initial._make(map(_add_in_eager_code, initial._fields, initial))
                )
            return self.values

    def read(self) -> State:
        """Return the state as tensors.

        At the top level of a graph, every call returns the same tensors, so that a loop of calls adds no ops. Under
        control dependencies and in conditionals, where the time of the read matters, every call adds ops that read.
        """
        if at_top_level_of_graph():
            return self._in_graph.get()[1]
        return self._initial._make(self._read(self.create(), self._initial._fields))

    def get(self, field: str) -> tf.Tensor:
        """Return one field of the state, as `read` returns it, without reading the others."""
        if at_top_level_of_graph():
            return getattr(self._in_graph.get()[1], field)
        return self._read(self.create(), [field])[0]

    def _read(self, variables: State, fields: Sequence[str]) -> list[tf.Tensor]:
        wanted = [getattr(variables, field) for field in fields]
        if self._saved or tf.compat.v1.executing_eagerly_outside_functions():
            return list(map(value_of, wanted))
        # In a graph, nobody initializes these variables.
        initialized = tf.reduce_all([variable.is_initialized() for variable in variables])
        initial = [getattr(self._initial, field) for field in fields]
        # The conditional has a name of its own. Without one it would take a name such as `cond_2`, and then other
        # conditionals, whose names are part of the keys in old checkpoints, would get other numbers.
        return tf.cond(
            initialized, lambda: list(map(value_of, wanted)), lambda: list(map(tf.constant, initial)), name="read"
        )

    def assign(self, state: State) -> Done:
        """Store a state; no field is stored before all fields are computed."""
        variables = self.create()
        with tf.control_dependencies(list(state)):
            return tf.group(*(variable.assign(value) for variable, value in zip(variables, state, strict=True)))

    def numbers(self) -> dict[str, Any]:
        """Return the state of eager code as Python numbers, and lists of them, by the names of the fields."""
        with tf.init_scope():
            return {name: value.numpy().tolist() for name, value in self.read()._asdict().items()}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Set the state of eager code from what `numbers` returned."""
        with tf.init_scope():
            variables = self.create()
            # All values are converted before the first is stored: if one is not a number, nothing changes.
            values = [np.array(numbers[name], initial.dtype) for name, initial in self._initial._asdict().items()]
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # A `tf.train.Checkpoint` in a graph, as `model_to_estimator` has it, holds the variables of that graph under
        # the names that those of eager code have.
        if not self._saved and save_type != "savedmodel":
            return {}
        with tf.init_scope():
            if self._saved and not tf.executing_eagerly():
                return dict(self._in_checkpoint_of_graph.get()._trackable_children(save_type, **kwargs))
        return dict(super()._trackable_children(save_type, **kwargs))

    def _make_in_graph(self) -> tuple[State, State]:
        initial, add = self._initial, add_saved_variable if self._saved else add_transient_variable
        variables = initial._make(map(add, initial._fields, initial))
        # Read here, so that the values can be fetched in every iteration, also after the graph was finalized.
        return variables, initial._make(self._read(variables, initial._fields))

    def _make_in_checkpoint(self) -> tf.Module:
        module = tf.Module()
        module.values = self._initial._make(map(_in_checkpoint, self.create(), self._initial))
        return module


def _add_in_eager_code(name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
    return tf.Variable(initial_value, name=name, trainable=False, **SAME_ON_ALL_REPLICAS)


class InCheckpoint(tf.Module):
    """A value that checkpoints hold like that of a variable: `read` returns it, `restore` gets a saved one.

    The value has no shape or type of its own, so it accepts that of any variable. A session that restores the
    checkpoint runs what `restore` returns.
    """

    def __init__(self, read: Callable[[], tf.Tensor], restore: Callable[[tf.Tensor], Done]) -> None:
        super().__init__()
        # Functions are no parts of a checkpoint, unlike a variable that was an attribute here.
        self._read = read
        self._restore = restore

    # A checkpoint has this name for the value of every variable.
    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self._read()}

    def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> Done:
        return self._restore(restored["VARIABLE_VALUE"])


def _in_checkpoint(variable: tf.Variable, initial: np.generic | np.ndarray) -> InCheckpoint:
    """Return a variable of a graph as a checkpoint holds it, which may be saved before a session initializes it."""

    def read() -> tf.Tensor:
        is_initialized = tf.compat.v1.is_variable_initialized(variable)
        return tf.cond(is_initialized, variable.read_value, lambda: tf.constant(initial))

    return InCheckpoint(read, lambda value: variable.assign(value).op)


class NotCheckpointed(tf.Module):
    """A module that describes one run of a program: in a SavedModel, whose functions use it, and in no checkpoint."""

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # This method is private: TensorFlow has no public way to be in a SavedModel but not in a checkpoint.
        return super()._trackable_children(save_type, **kwargs) if save_type == "savedmodel" else {}


class ByVariables(NotCheckpointed, Generic[Kept]):
    """One object for each list of variables, made when steps are first taken with these."""

    def __init__(self, make: Callable[[Sequence[str]], Kept]) -> None:
        super().__init__()
        self._make = make
        self._each: dict[str, Kept] = {}

    def __iter__(self) -> Iterator[Kept]:
        """Iterate over the objects, in the order of their first use."""
        return iter(self._each.values())

    def of(self, names: Sequence[str]) -> Kept:
        """Return the object for the variables of these names, making it on the first call."""
        # A string, because TensorFlow tracks nothing in a dictionary with other keys.
        key = "\n".join(names)
        if key not in self._each:
            self._each[key] = self._make(names)
        return self._each[key]
