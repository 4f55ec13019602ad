"""Scalar variables of a TF1 graph that can be fetched and restored by their plain name.

tf.contrib kept its state in reference variables: `session.run("loss_scale:0")` gave the number, and the checkpoint
key was `loss_scale`. For a resource variable of that name `loss_scale:0` is the handle, which is no number. So the
variable is made inside a scope of its name, and the name itself goes to an op that reads it:

    reference variable     loss_scale                                    checkpoint key loss_scale
    resource variable      loss_scale/value, read by an op loss_scale    checkpoint key loss_scale
"""

import numpy as np
import tensorflow as tf


def add_saved_variable(name: str, initial_value: np.generic) -> tf.Variable:
    """Make a variable that is initialised, saved and fetched as tf.contrib's were.

    Args:
        name: Its name; the current name scope comes before it, and a number behind it when it is taken.
        initial_value: Its initial value, a scalar.

    Returns:
        A reference variable when resource variables and control flow v2 are both off, and no `tf.distribute` strategy
        is active (their mirrored variables are resource variables always); else a resource variable.
    """
    if not (
        tf.compat.v1.resource_variables_enabled()
        or tf.compat.v1.control_flow_v2_enabled()
        or tf.distribute.has_strategy()
    ):
        return tf.compat.v1.Variable(initial_value, name=name, trainable=False, use_resource=False)
    # `get_variable` would collide in a second manager, and would meet the user's custom getters.
    with tf.name_scope(name) as scope:
        variable = tf.compat.v1.Variable(
            initial_value, name="value", trainable=False, use_resource=True, **_SAME_ON_ALL_REPLICAS
        )
        # A name that ends in a slash is taken as it is.
        tf.identity(variable.read_value(), name=scope)
    _set_checkpoint_key(variable, variable.name.removesuffix("/value:0"))
    return variable


def add_transient_variable(name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
    """Make a variable that no initializer call and no Saver knows of.

    Args:
        name: Its name.
        initial_value: Its initial value.

    Returns:
        A resource variable in no collection, uninitialised in every new session.
    """
    return tf.compat.v1.Variable(
        initial_value, name=name, trainable=False, use_resource=True, collections=[], **_SAME_ON_ALL_REPLICAS
    )


def checkpoint_key(variable: tf.Variable) -> str:
    """Return the key under which every Saver that takes variables as a list saves a variable of a graph.

    Args:
        variable: The variable, or a part of a partitioned one: all of its parts have one key.
    """
    # Private: see `_set_checkpoint_key`.
    if isinstance(variable, tf.distribute.DistributedValues):
        return str(variable._common_name)
    part = variable._get_save_slice_info()
    return str(variable.op.name if part is None else part.full_name)


def at_top_level_of_graph() -> bool:
    """Tell whether an op made now would stand in a graph, under no control dependency and in no conditional."""
    graph = tf.compat.v1.get_default_graph()
    with tf.init_scope():
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph() is not graph:
            return False
    # Private, for want of a public way to ask without adding an op.
    return not graph._current_control_dependencies() and graph._get_control_flow_context() is None


#: Every replica computes the same state: mirror it, and never reduce it.
_SAME_ON_ALL_REPLICAS = {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}


class _WholeVariable(tf.Variable.SaveSliceInfo):
    """A slice that is all of its variable: the Saver then writes an ordinary entry."""

    def __init__(self, key: str) -> None:
        super().__init__(full_name=key, full_shape=[], var_offset=[], var_shape=[])

    @property
    def spec(self) -> str:
        """The part of the entry that the variable covers; empty for all of it."""
        return ""


def _set_checkpoint_key(variable: tf.Variable, key: str) -> None:
    # Private, for want of a public way to give a variable in GLOBAL_VARIABLES a key of its own that every Saver
    # honours (the default one, Estimator's, and those made over `global_variables()`).
    if isinstance(variable, tf.distribute.DistributedValues):
        variable._common_name = key
    else:
        variable._set_save_slice_info(_WholeVariable(key))
