"""Maps the keys of an old checkpoint to the variables of a graph whose names differ.

Variables that tf.compat.v1 creates under TensorFlow 2 have the names that they had under TensorFlow 1.15, except for:

    Adam's powers    Their scope counts the conditionals (`tf.cond`) that were built before them, and so depends on the
                     other parts of the script. A bare Adam, and TensorFlow's own wrapper, have no such scope:
                         beta1_power    cond/beta1_power    cond_1/beta1_power    cond/cond/beta1_power
                     If the step is built inside the user's own `tf.cond`, control flow v1 gives the last of these names
                     and control flow v2 gives the second.
    loss_scale       A number follows the name if the name was already taken, by a summary or a second manager.

The variables are therefore matched by their names without the scopes of conditionals, and Adam's powers and the
variables of managers also without their numbers. If several variables have the same name after that, as in a GAN, they
are matched in the order in which they were created.
"""

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.checkpoints.files import open_checkpoint
from tfmp.core import lists
from tfmp.core.storage.graph_variables import checkpoint_key, whole_shape


def variable_map(path: str | os.PathLike[str], variables: Iterable[tf.Variable] | None = None) -> dict[str, Any]:
    """Return the variable that belongs to each key of an old checkpoint, for the `var_list` of a `Saver`.

    The names differ if the checkpoint was written by a script with another number of conditionals (`tf.cond`), under
    the other version of control flow, by an optimizer without loss scaling, or by TensorFlow's own wrapper for TF1.
    Variables whose names are unchanged are mapped too.

    Args:
        path: The prefix of the checkpoint, or the directory that holds it.
        variables: The variables to restore; by default `tf.compat.v1.global_variables()`. Leave out the variables that
            the checkpoint does not hold, and initialize them.

    Returns:
        The variables by their keys in the checkpoint; for a partitioned variable, the list of its parts.

    Raises:
        TypeError: `variables` is not a list of variables.
        FileNotFoundError: There is no such checkpoint.
        ValueError: The checkpoint cannot be read, or does not hold all of the variables, or they match its keys in more
            than one way. The error lists these variables with the most similar keys of the checkpoint.

    Examples:
        >>> import tempfile, tfmp
        >>> def build(optimizer):
        ...     w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
        ...     return optimizer.minimize(tf.reduce_sum(w))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...         _ = build(tf.compat.v1.train.AdamOptimizer())  # saved by a run without loss scaling
        ...         session.run(tf.compat.v1.global_variables_initializer())
        ...         _ = tf.compat.v1.train.Saver().save(session, path + "/model.ckpt")
        ...     with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...         opt = tf.compat.v1.train.AdamOptimizer()
        ...         _ = build(tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager(128)))
        ...         key_to_variable = tfmp.checkpoints.variable_map(path)
        ...         tf.compat.v1.train.Saver(key_to_variable).restore(session, path + "/model.ckpt")
        >>> key_to_variable["beta1_power"].op.name
        'cond/beta1_power'
    """
    reader = open_checkpoint(os.fspath(path))
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    wanted_variables = tf.compat.v1.global_variables() if variables is None else lists.variables("variables", variables)
    in_graph = _by_key(wanted_variables)
    wanted, saved = _grouped(in_graph), _grouped(shapes)
    mapping: dict[str, Any] = {}
    faults = []
    for place, names in wanted.items():
        keys = saved.get(place, [])
        # Variables are paired by their exact names only if the checkpoint has all of these names. If it has only some,
        # an equal name may belong to another optimizer, so all variables are paired in order.
        paired = {name: name for name in names} if set(names) <= set(keys) else dict(zip(names, keys, strict=False))
        for name in names:
            here = in_graph[name]
            if len(keys) != len(names) and paired.get(name) != name:
                faults.append(_missing(name, names, keys, list(shapes)))
            elif (tuple(shapes[paired[name]]), dtypes[paired[name]]) != (here.shape, here.dtype):
                faults.append(
                    f"{name}: {here.dtype.name} of shape {here.shape} in the graph, {dtypes[paired[name]].name} of "
                    f"shape {tuple(shapes[paired[name]])} in the checkpoint"
                )
            else:
                mapping[paired[name]] = here.variable
    if faults:
        raise ValueError(
            f"the checkpoint {path} does not fit {len(faults)} of {len(in_graph)} variables: leave the variables "
            "that it does not hold out of `variables`, and initialize them.\n  " + "\n  ".join(faults)
        )
    return mapping


class _InGraph(NamedTuple):
    """A variable, or the list of its parts, with the shape and type of the whole variable in a checkpoint."""

    variable: Any
    shape: tuple[int, ...]
    dtype: tf.DType


def _by_key(variables: Iterable[tf.Variable]) -> dict[str, _InGraph]:
    parts = defaultdict(list)
    for variable in variables:
        parts[checkpoint_key(variable)].append(variable)
    found = {}
    for key, listed in parts.items():
        first, shape = listed[0], whole_shape(listed[0])
        if shape is None:
            found[key] = _InGraph(first, tuple(first.shape.as_list()), first.dtype.base_dtype)
        else:
            found[key] = _InGraph(listed, shape, first.dtype.base_dtype)
    return found


_CONDITIONAL = re.compile(r"cond(?:_(\d+))?")
_NUMBERED = re.compile(r"(beta[12]_power|loss_scale|good_steps|bad_steps)(?:_(\d+))?")

# The ending of tfmp's variables if the script passed them to the Saver by the names of their ops.
_VALUE = re.compile(r"\b((?:loss_scale|good_steps|bad_steps)(?:_\d+)?)/value$")


def _grouped(keys: Iterable[str]) -> dict[str, list[str]]:
    """Group the keys by their names without numbers; sort each group by the order of creation."""
    groups: dict[str, list[tuple[list[int], str]]] = defaultdict(list)
    for key in keys:
        numbers, rest = [], []
        for part in _VALUE.sub(r"\1", key).split("/"):
            if match := _CONDITIONAL.fullmatch(part):
                numbers.append(int(match[1] or 0))
            elif match := _NUMBERED.fullmatch(part):
                rest.append(match[1])
                numbers.append(int(match[2] or 0))
            else:
                rest.append(part)
        groups["/".join(rest)].append((numbers, key))
    return {place: [key for _, key in sorted(group)] for place, group in groups.items()}


def _missing(name: str, names: Sequence[str], keys: Sequence[str], all_keys: Sequence[str]) -> str:
    if keys:
        return f"{name}: ambiguous, there are {', '.join(names)} in the graph and {', '.join(keys)} in the checkpoint"
    nearest = difflib.get_close_matches(name, all_keys, n=3, cutoff=0.4)
    return f"{name}: missing, the nearest are {', '.join(nearest)}" if nearest else f"{name}: missing"
