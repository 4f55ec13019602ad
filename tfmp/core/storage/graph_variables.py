"""Keeps what belongs to a TF1 graph in that graph, above all small variables under their plain names.

tf.contrib kept its state in reference variables: `session.run("loss_scale:0")` returned the number, and the checkpoint
key was `loss_scale`. Both must still work with resource variables. But if a resource variable has this name,
`loss_scale:0` is the variable's handle instead of the number. The variable is therefore made inside a name scope
`loss_scale`, and an op that reads the variable gets the name itself:

    kind of variable     its name            fetched as `loss_scale:0`     checkpoint key
    reference            loss_scale          the variable                  loss_scale
    resource             loss_scale/value    an op that reads it           loss_scale
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import tensorflow as tf

from tfmp.core.tensorflow_internals import (
    key_of_distributed,
    set_key_of_distributed,
    set_slice_information,
    slice_information,
)

Kept = TypeVar("Kept")

#: All replicas assign the same value, so a mirrored variable takes the first replica's value instead of reducing them.
SAME_ON_ALL_REPLICAS = {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}

#: The collection of a graph that has all variables of tfmp that scripts initialize and save. Its key is no string, as
#: in `OncePerGraph`.
STATE_COLLECTION = ("tfmp", "state")
#: The collections of such a variable.
SAVED_COLLECTIONS = (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, STATE_COLLECTION)


class OncePerGraph(Generic[Kept]):
    """Makes an object once for each graph, outside control dependencies, conditionals and functions.

    A manager may be made in one graph and used in others, as by Estimator. The object is deleted together with its
    graph. With `make=list` it is a list in each graph, by which a monitor finds what is built there. In eager code
    nothing is kept, so that such a list is empty.

    It is kept in a collection whose key is no string, because TensorFlow exports the collections whose keys are.
    """

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make

    def get(self) -> Kept:
        """Return the current graph's object, making it on the first call; in eager code, make a new one."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return self._make()
            kept: list[Kept] = tf.compat.v1.get_collection_ref(self)
            if not kept:
                # A slice: another thread, of another replica, may have made one meanwhile. All threads return the last.
                kept[:] = [self._make()]
            return kept[0]


def add_saved_variable(name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
    """Make a variable that is initialized, saved and fetched like the variables of tf.contrib's managers.

    Its name is put under the current name scope, with a number if it is taken. It is a reference variable if resource
    variables, control flow v2 and `tf.distribute` strategies are all off; otherwise it is a resource variable.
    """
    if not (
        tf.compat.v1.resource_variables_enabled()
        or tf.compat.v1.control_flow_v2_enabled()
        or tf.distribute.has_strategy()
    ):
        return tf.compat.v1.Variable(
            initial_value, name=name, trainable=False, use_resource=False, collections=SAVED_COLLECTIONS
        )
    # Not `get_variable`: it refuses a name that a second manager makes, and applies custom getters of the user.
    with tf.name_scope(name) as scope:
        variable = tf.compat.v1.Variable(
            initial_value,
            name="value",
            trainable=False,
            use_resource=True,
            collections=SAVED_COLLECTIONS,
            **SAME_ON_ALL_REPLICAS,
        )
        # `scope` ends in a slash. TensorFlow uses such a name unchanged, so this op is called `loss_scale`.
        tf.identity(variable.read_value(), name=scope)
    key = variable.name.removesuffix("/value:0")
    # Every `Saver` must respect the key: the default one, Estimator's, and those made for `global_variables()`.
    if isinstance(variable, tf.distribute.DistributedValues):
        set_key_of_distributed(variable, key)
    else:
        set_slice_information(variable, _WholeVariable(key))
    return variable


class _WholeVariable(tf.Variable.SaveSliceInfo):
    """Slice information that sets a variable's checkpoint key; the slice is the whole variable.

    A `Saver` uses `full_name` as the key. Since `spec` is empty, it writes an ordinary entry instead of a slice.
    """

    def __init__(self, key: str) -> None:
        super().__init__(full_name=key, full_shape=[], var_offset=[], var_shape=[])

    @property
    def spec(self) -> str:
        """The part of the checkpoint entry that the variable covers; an empty string means the whole entry."""
        return ""


def add_transient_variable(name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
    """Make a resource variable in no collection, so that scripts neither initialize nor save it."""
    return tf.compat.v1.Variable(
        initial_value, name=name, trainable=False, use_resource=True, collections=[], **SAME_ON_ALL_REPLICAS
    )


def value_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value that a variable has when it is read, whatever is assigned later."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        # Without a copy, for which `read_value` has an op more. The first such op of each dtype takes 1 to 3 ms.
        return variable.value()
    value = variable.read_value()
    is_reference = variable.dtype != variable.dtype.base_dtype
    # What is read of a reference variable shares its memory, and would change when the next value is assigned, though a
    # step may still need the scale. It needs no count; and GPUs have no kernel that copies int32.
    return tf.raw_ops.DeepCopy(x=value) if is_reference and value.dtype.is_floating else value


def checkpoint_key(variable: tf.Variable) -> str:
    """Return the checkpoint key of a variable of a graph, if the `Saver` was given a list of variables.

    All parts of a partitioned variable have the same key.
    """
    if isinstance(variable, tf.distribute.DistributedValues):
        return key_of_distributed(variable)
    part = slice_information(variable)
    return str(variable.op.name if part is None else part.full_name)


def whole_shape(variable: tf.Variable) -> tuple[int, ...] | None:
    """Return the shape of the whole variable for one part of a partitioned variable; None for any other variable."""
    part = None if isinstance(variable, tf.distribute.DistributedValues) else slice_information(variable)
    # A `_WholeVariable` has no shape.
    return tuple(part.full_shape) if part is not None and part.full_shape else None
