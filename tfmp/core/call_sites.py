"""Finds the line of the user's script that something comes from."""

import inspect
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

#: Packages whose code is not the user's.
_LIBRARIES = ("tfmp", "tensorflow", "keras", "tf_keras", "tensorflow_estimator", "horovod")
# What AutoGraph makes of a function; TensorFlow names the original in an op's traceback.
_GENERATED = "__autograph_generated_file"
#: Ops looked at on the way from a gradient to where `tf.gradients` made it. Clipping puts a few ops per gradient there.
_MOST_OPS = 2000


class CallSite(NamedTuple):
    """A line of a file, and what was called from it."""

    filename: str
    lineno: int

    def __str__(self) -> str:
        """Return it as `train.py:41`."""
        return f"{os.path.basename(self.filename)}:{self.lineno}"


def line_of_call() -> str:
    """Return the line of the user's that the present call comes from, as `train.py:41`.

    Example:
        >>> line_of_call()
        '<doctest tfmp.core.call_sites.line_of_call[0]>:1'
    """
    frame = inspect.currentframe()
    frames = []
    while frame is not None:
        frames.append(CallSite(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return str(_innermost_of_user(frames) or "an unknown line")


def line_of_op(op: tf.Operation) -> str | None:
    """Return the line of the user's that made an op, or None if none did.

    Args:
        op: The op.

    Example:
        >>> with tf.Graph().as_default():
        ...     line_of_op(tf.constant(1.0).op)
        '<doctest tfmp.core.call_sites.line_of_op[0]>:2'
    """
    site = _innermost_of_user(CallSite(frame.filename, frame.lineno) for frame in reversed(list(op.traceback)))
    return None if site is None else str(site)


def line_of_gradients(grads: Iterable[Any]) -> str:
    """Return the line of the user's that made the first gradient; in eager code, that of the present call.

    Args:
        grads: The gradients.

    Example:
        >>> line_of_gradients([None, tf.constant(1.0)])
        '<doctest tfmp.core.call_sites.line_of_gradients[0]>:1'
    """
    op = next(iter(ops_of(grads)), None)
    return (op and line_of_op(op)) or line_of_call()


def made_within(op: tf.Operation, *files: str) -> bool:
    """Tell whether code of one of some files of the libraries made an op, on the user's behalf.

    Args:
        op: The op.
        files: How the names of the files end.
    """
    for frame in reversed(list(op.traceback)):
        if _is_users(frame.filename):
            return False
        if frame.filename.endswith(files):
            return True
    return False


def made_by_tfmp(op: tf.Operation) -> bool:
    """Tell whether this package made an op.

    Args:
        op: The op.
    """
    return any(frame.filename.startswith(_directories("tfmp")) for frame in op.traceback)


def made_by_clipping(op: tf.Operation) -> bool:
    """Tell whether this package's clipping made an op, on the user's behalf.

    Args:
        op: The op.
    """
    return made_within(op, os.path.join("tfmp", "core", "clipping.py"))


def ops_of(grads: Iterable[Any]) -> list[tf.Operation]:
    """Return the ops that give gradients; eager tensors have none.

    Args:
        grads: The gradients.
    """
    values = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
    return [value.op for value in values if tf.is_tensor(value) and not hasattr(value, "numpy")]


def gradient_op(grads: Iterable[Any]) -> tf.Operation | None:
    """Return the op that gave the gradients: of `tf.gradients`, or of this package.

    What the script put between it and them, clipping say, is left out; this package's clipping too.

    Args:
        grads: The gradients.

    Returns:
        The op; None where neither is found, as with a `tf.GradientTape`.
    """
    queue = deque(ops_of(grads))
    seen = set(queue)
    while queue and len(seen) < _MOST_OPS:
        op = queue.popleft()
        is_found = made_by_tfmp(op) or made_within(op, "gradients_impl.py")
        if is_found and not made_by_clipping(op):
            return op
        inputs = [tensor.op for tensor in op.inputs if tensor.op not in seen]
        seen.update(inputs)
        queue.extend(inputs)
    return None


def _innermost_of_user(sites: Iterable[CallSite]) -> CallSite | None:
    return next((site for site in sites if _is_users(site.filename)), None)


def _is_users(filename: str) -> bool:
    if filename.startswith("<frozen") or _GENERATED in filename:
        return False
    if filename.startswith(_directories(*_LIBRARIES)):
        return False
    paths = sysconfig.get_paths()
    # Installed packages stand below the standard library, and may be the user's.
    installed = filename.startswith((paths["purelib"], paths["platlib"]))
    return installed or not filename.startswith((paths["stdlib"], paths["platstdlib"]))


def _directories(*packages: str) -> tuple[str, ...]:
    files = (getattr(sys.modules.get(package), "__file__", None) for package in packages)
    return tuple(os.path.join(os.path.dirname(file), "") for file in files if file)
