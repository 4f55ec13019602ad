"""Which steps a graph holds, for monitors that are given no optimizer."""

import tensorflow as tf

from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow_counts import OverflowCounts, OverflowReport

#: Not a string, so that TensorFlow does not try to export what the collection holds.
_STEPS_OF_GRAPH = ("tfmp", "steps")


def managers_of_graph() -> list[LossScaleManager]:
    """Return the managers whose steps were built in the current graph, in the order of building.

    Example:
        >>> with tf.Graph().as_default():
        ...     managers_of_graph()
        []
    """
    return list(dict.fromkeys(manager for manager, _ in tf.compat.v1.get_collection(_STEPS_OF_GRAPH)))


def overflow_reports_of_graph(manager: LossScaleManager) -> list[OverflowReport]:
    """Return whose gradients overflowed in the steps of a manager that were built in the current graph.

    Args:
        manager: The manager.

    Example:
        >>> import tfmp
        >>> with tf.Graph().as_default():
        ...     overflow_reports_of_graph(tfmp.FixedLossScaleManager(8))
        []
    """
    return [counts.report() for counts in counts_of_graph(manager)]


def counts_of_graph(manager: LossScaleManager) -> list[OverflowCounts]:
    """Return the counts of a manager's steps that were built in the current graph.

    Args:
        manager: The manager.
    """
    noted = tf.compat.v1.get_collection(_STEPS_OF_GRAPH)
    return list(dict.fromkeys(counts for of_manager, counts in noted if of_manager is manager))


def note_in_graph(manager: LossScaleManager, counts: OverflowCounts) -> None:
    """Take note of a step that is built in a graph; once is enough. Eager code needs no note.

    Args:
        manager: Its manager.
        counts: Its counts of what overflowed.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            tf.compat.v1.add_to_collection(_STEPS_OF_GRAPH, (manager, counts))
