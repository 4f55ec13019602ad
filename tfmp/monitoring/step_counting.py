"""Finds where a script advances the global step by itself."""

from collections.abc import Iterator

import tensorflow as tf

from tfmp.core import script_lines

_ASSIGNMENTS = {"Assign", "AssignAdd", "AssignVariableOp", "AssignAddVariableOp"}
#: What stands between a variable and its assignment in a conditional or a loop of control flow v1.
_PASSED_THROUGH = {"Switch", "RefSwitch", "Enter", "RefEnter", "Identity", "RefIdentity"}
#: Where TensorFlow restores variables.
_RESTORING = ("saver.py", "saveable_object_util.py", "checkpoint/restore.py", "functional_saver.py")


def lines_that_assign(variable: tf.Variable) -> list[str]:
    """Return the lines of the script that assign to a variable, beside what tfmp, a Saver and its initializer do.

    Args:
        variable: The variable, of a graph.

    Returns:
        The lines, as `train.py:41`. Those inside conditionals of control flow v2 are not found.

    Example:
        >>> with tf.Graph().as_default():
        ...     step = tf.compat.v1.train.get_or_create_global_step()
        ...     _ = tf.compat.v1.assign_add(step, 1)
        ...     lines_that_assign(step)
        ['<doctest tfmp.monitoring.step_counting.lines_that_assign[0]>:3']
    """
    # A mirrored variable knows its strategy, which need not be the active one.
    strategy = getattr(variable, "distribute_strategy", None) or tf.distribute.get_strategy()
    parts = strategy.experimental_local_results(variable)
    graph = parts[0].graph
    # The op of a resource variable makes its handle, that of a reference variable the reference.
    targets = {part.op for part in parts}
    initializers = {part.initializer for part in parts}
    lines = (
        script_lines.line_of_op(op)
        for op in _assignments(graph)
        if _target(op) in targets
        and op not in initializers
        and not script_lines.made_by_tfmp(op)
        and not script_lines.made_within(op, *_RESTORING)
    )
    return list(dict.fromkeys(line for line in lines if line is not None))


def _assignments(graph: tf.Graph) -> Iterator[tf.Operation]:
    return (op for op in graph.get_operations() if op.type in _ASSIGNMENTS)


def _target(op: tf.Operation) -> tf.Operation:
    target = op.inputs[0].op
    while target.type in _PASSED_THROUGH:
        target = target.inputs[0].op
    return target
