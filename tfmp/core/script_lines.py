"""Finds the line of the user's script from which a function was called or an op was made, for messages."""

import inspect
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

#: Packages that stand between a script and this module. A line in one of them is not a line of the user's.
_LIBRARIES = ("tfmp", "tensorflow", "keras", "tf_keras", "tensorflow_estimator", "horovod")
# Part of the name of the files that AutoGraph generates. Such a file is skipped: the traceback of an op names the
# original line too.
_GENERATED = "__autograph_generated_file"
#: The largest number of ops that `gradient_op` visits. Clipping adds only a few ops per gradient.
_MOST_OPS = 2000


class CallSite(NamedTuple):
    """A line of a source file."""

    filename: str
    lineno: int

    def __str__(self) -> str:
        """Return the line in the form `train.py:41`."""
        return f"{os.path.basename(self.filename)}:{self.lineno}"


def line_of_call() -> str:
    """Return the line of the user's script that is being executed, in the form `train.py:41`.

    Examples:
        >>> line_of_call()
        '<doctest tfmp.core.script_lines.line_of_call[0]>:1'
    """
    frame = inspect.currentframe()
    frames = []
    while frame is not None:
        frames.append(CallSite(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return str(_innermost_of_user(frames) or "an unknown line")


def line_of_op(op: tf.Operation) -> str | None:
    """Return the line of the user's script that made an op, or None if there is no such line.

    Args:
        op: An op of a graph.

    Examples:
        >>> with tf.Graph().as_default():
        ...     line_of_op(tf.constant(1.0).op)
        '<doctest tfmp.core.script_lines.line_of_op[0]>:2'
    """
    site = _innermost_of_user(CallSite(frame.filename, frame.lineno) for frame in reversed(list(op.traceback)))
    return None if site is None else str(site)


def line_of_gradients(grads: Iterable[Any]) -> str:
    """Return the line of the user's script that made the first gradient.

    Eager tensors do not record where they were made. For them the result is the line that is being executed.

    Args:
        grads: Gradients of a graph or of eager mode; some may be None.

    Examples:
        >>> line_of_gradients([None, tf.constant(1.0)])
        '<doctest tfmp.core.script_lines.line_of_gradients[0]>:1'
    """
    op = next(iter(ops_of(grads)), None)
    return (op and line_of_op(op)) or line_of_call()


def made_within(op: tf.Operation, *files: str) -> bool:
    """Return whether the user's code called code in one of these library files, and that code made the op.

    Args:
        op: An op of a graph.
        files: The ends of the files' paths.
    """
    # The innermost frame comes first. The search stops at the user's line, so library code that called it, such as
    # Estimator, does not count.
    for frame in reversed(list(op.traceback)):
        if _is_users(frame.filename):
            return False
        if frame.filename.endswith(files):
            return True
    return False


def made_by_tfmp(op: tf.Operation) -> bool:
    """Return whether code of this package made an op, directly or through a library.

    Args:
        op: An op of a graph.
    """
    return any(frame.filename.startswith(_directories("tfmp")) for frame in op.traceback)


def made_by_clipping(op: tf.Operation) -> bool:
    """Return whether one of this package's functions that clip gradients made an op.

    Args:
        op: An op of a graph.
    """
    return made_within(op, os.path.join("tfmp", "core", "gradients", "clipping.py"))


def ops_of(grads: Iterable[Any]) -> list[tf.Operation]:
    """Return the ops whose outputs the gradients are. Eager tensors and None have no op and are left out.

    Args:
        grads: Gradients of a graph or of eager mode; some may be None.
    """
    values = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
    # Only eager tensors have the method `numpy`.
    return [value.op for value in values if tf.is_tensor(value) and not hasattr(value, "numpy")]


def gradient_op(grads: Iterable[Any]) -> tf.Operation | None:
    """Return the op by which `tf.gradients` or this package made the gradients.

    The search goes from the gradients back along the inputs of the ops. It passes over ops that the script added after
    differentiating, such as clipping, whether the clipping is TensorFlow's or this package's.

    Args:
        grads: Gradients of a graph.

    Returns:
        The op; None if the search finds neither, for example with gradients of a `tf.GradientTape`.
    """
    # Breadth first, so that the op closest to the gradients is found.
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
    # Python's own frozen modules, such as importlib, have names like `<frozen runpy>`.
    if filename.startswith("<frozen") or _GENERATED in filename:
        return False
    if filename.startswith(_directories(*_LIBRARIES)):
        return False
    paths = sysconfig.get_paths()
    # `site-packages` is a directory inside that of the standard library. A script may be an installed package, so files
    # in `site-packages` count as the user's unless they belong to one of the libraries above.
    installed = filename.startswith((paths["purelib"], paths["platlib"]))
    return installed or not filename.startswith((paths["stdlib"], paths["platstdlib"]))


def _directories(*packages: str) -> tuple[str, ...]:
    files = (getattr(sys.modules.get(package), "__file__", None) for package in packages)
    return tuple(os.path.join(os.path.dirname(file), "") for file in files if file)
