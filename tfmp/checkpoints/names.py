"""Which variable of a graph belongs to which key of an old checkpoint, where names have changed.

What tf.compat.v1 makes under TensorFlow 2 has the names of TensorFlow 1.15, but for these:

    Adam's powers    their scope counts the conditionals that were made before, and so tells of the script's other
                     parts; a bare Adam, and TensorFlow's own wrapper, have none:
                         beta1_power    cond/beta1_power    cond_1/beta1_power    cond/cond/beta1_power
                     Inside the user's own `tf.cond` control flow v1 gives the last of these, v2 the second.
    loss_scale       the number behind it counts what else has the name: a summary, or a second manager.

So a variable is looked for by its name without the scopes of conditionals, and these few without their numbers.
Several of one such name, as in a GAN, are taken in the order in which they were made.
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
from tfmp.core.storage.graph_variables import checkpoint_key


def checkpoint_variable_map(
    path: str | os.PathLike[str], variables: Iterable[tf.Variable] | None = None
) -> dict[str, Any]:
    """Return which variable each key of an old checkpoint belongs to, as a `Saver` takes it.

    `Saver(var_list=...)` then restores a checkpoint whose names differ from the graph's: one that was written with
    another number of conditionals (`tf.cond`) in the script, under another control flow, by a bare optimizer, or by
    TensorFlow's own wrapper for TF1. Variables of the same name are restored as ever.

    Args:
        path: The checkpoint's prefix, or the directory that holds it.
        variables: The variables to restore; by default `tf.compat.v1.global_variables()`. Leave out what the checkpoint
            does not hold, and initialize it.

    Returns:
        The variables by their keys in the checkpoint; for a partitioned variable the list of its parts.

    Raises:
        TypeError: `variables` is no list of variables.
        FileNotFoundError: There is no checkpoint.
        ValueError: It cannot be read; or it does not hold all of the variables; or they can be assigned in more than
            one way. The error lists the variables, and what in the checkpoint is nearest.

    Example:
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
        ...         key_to_variable = tfmp.checkpoint_variable_map(path)
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
        # By name, if all of them are there: a single exact name among several may be another optimizer's.
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
            f"the checkpoint {path} does not fit {len(faults)} of {len(in_graph)} variables: leave out of `variables` "
            "what it does not hold, and initialize that.\n  " + "\n  ".join(faults)
        )
    return mapping


class _InGraph(NamedTuple):
    """A variable, or the parts of one, with the shape that it has in a checkpoint."""

    variable: Any
    shape: tuple[int, ...]
    dtype: tf.DType


def _by_key(variables: Iterable[tf.Variable]) -> dict[str, _InGraph]:
    parts = defaultdict(list)
    for variable in variables:
        parts[checkpoint_key(variable)].append(variable)
    return {key: _in_graph(found) for key, found in parts.items()}


def _in_graph(parts: Sequence[Any]) -> _InGraph:
    first = parts[0]
    of_whole = None if isinstance(first, tf.distribute.DistributedValues) else first._get_save_slice_info()
    if of_whole is None or not of_whole.full_shape:
        return _InGraph(first, tuple(first.shape.as_list()), first.dtype.base_dtype)
    return _InGraph(list(parts), tuple(of_whole.full_shape), first.dtype.base_dtype)


_CONDITIONAL = re.compile(r"cond(?:_(\d+))?")
_NUMBERED = re.compile(r"(beta[12]_power|loss_scale|good_steps|bad_steps)(?:_(\d+))?")

# What a Saver wrote that was given tfmp's variables by the names of their ops.
_BELOW = re.compile(r"\b((?:loss_scale|good_steps|bad_steps)(?:_\d+)?)/value$")


def _grouped(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys in the order in which they were made, by what they are called without that order."""
    groups: dict[str, list[tuple[list[int], str]]] = defaultdict(list)
    for key in keys:
        numbers, rest = [], []
        for part in _BELOW.sub(r"\1", key).split("/"):
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
