"""Recognizes Horovod: whether it runs, and which optimizers are its own."""

import inspect
import sys
from types import ModuleType


def running_horovod() -> ModuleType | None:
    """Return the module `horovod.tensorflow` if the program has initialized it.

    Example:
        >>> running_horovod() is None
        True
    """
    # Whoever runs it has imported it; nobody else need have it.
    horovod = sys.modules.get("horovod.tensorflow")
    return horovod if horovod is not None and horovod.is_initialized() else None


def is_horovods(opt: object) -> bool:
    """Tell whether an optimizer is one of Horovod's, which share gradients themselves.

    Args:
        opt: The optimizer.

    Example:
        >>> import tensorflow as tf
        >>> is_horovods(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        False
    """
    return type(opt).__module__.partition(".")[0] == "horovod"


def refuse_unsupported_horovods(opt: object) -> None:
    """Say so if an optimizer is one of Horovod's that does not average the gradients of each step.

    Args:
        opt: The optimizer to wrap.

    Raises:
        ValueError: It is such a one.

    Example:
        >>> import tensorflow as tf
        >>> refuse_unsupported_horovods(tf.compat.v1.train.GradientDescentOptimizer(0.5))
    """
    # By private names, since Horovod (0.28.1) tells in no other way.
    if is_horovods(opt) and getattr(opt, "_agg_helper", None) is not None:
        raise ValueError(
            "hvd.DistributedOptimizer(..., backward_passes_per_step=n) sums scaled gradients over n steps, and the "
            "scale may change between them: leave backward_passes_per_step at 1."
        )
    if is_horovods(opt) and type(opt).__name__ == "_DistributedAdasumOptimizer":
        raise ValueError("hvd.DistributedOptimizer(..., op=hvd.Adasum) shares no gradients: use op=hvd.Average.")


def without_horovods(opt: object) -> object:
    """Return the optimizer that Horovod's wraps, or the optimizer itself if it is none of Horovod's.

    Args:
        opt: The optimizer.

    Example:
        >>> import tensorflow as tf
        >>> opt = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        >>> without_horovods(opt) is opt
        True
    """
    # By a private name (Horovod 0.28.1): what is public of it hands methods on, and no attributes.
    return getattr(opt, "_optimizer", opt) if is_horovods(opt) else opt


def called_by_horovods(opt: object) -> bool:
    """Tell whether a method of the Horovod optimizer around this one is running.

    Nothing else tells an optimizer what wraps it; and what is wrapped stands in a private attribute (Horovod 0.28.1).

    Args:
        opt: The optimizer.

    Example:
        >>> import tensorflow as tf
        >>> called_by_horovods(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        False
    """
    frame = inspect.currentframe()
    while frame is not None:
        # Not by the module of the code: AutoGraph runs a copy of it.
        owner = frame.f_locals.get("self")
        if is_horovods(owner) and getattr(owner, "_optimizer", None) is opt:
            return True
        frame = frame.f_back
    return False
