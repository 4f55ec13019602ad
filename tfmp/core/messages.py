"""What messages to users need: a logger that is seen, and the line of the script that they are about."""

import inspect
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import tensorflow as tf

from tfmp.core import lists
from tfmp.core.tensorflow_internals import GENERATED_FILE

#: Packages that stand between a script, or another library, and this module.
_HOSTS = ("tfmp", "tensorflow", "keras", "tf_keras", "tensorflow_estimator", "horovod")
#: The names of the directories that packages are installed in.
_INSTALLED = {"site-packages", "dist-packages"}


def visible_logger() -> logging.Logger:
    """Return the logger "tfmp", and make sure that its messages of level INFO are visible.

    The level becomes INFO unless the program has set one; without a handler, messages go to standard error.
    """
    logger = logging.getLogger("tfmp")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return logger


def script_line(grads: Iterable[Any] = ()) -> str:
    """Return the line of the user's script that made the first gradient, in the form `train.py:41`.

    It is the line that is being executed if only a library's lines made it, or nothing records what did: without a
    gradient, and for an eager tensor.
    """
    made = [frame for op in ops_of(grads)[:1] for frame in op.traceback]
    frames = reversed([*traceback.extract_stack(), *made])
    outside = [(_whose(frame.filename), _shown(frame.filename, frame.lineno)) for frame in frames]
    # A script may be an installed package itself. Then there is no other line.
    lines = [line for wanted in ("user", "library") for whose, line in outside if whose == wanted]
    return lines[0] if lines else "an unknown line"


def with_library(line: str) -> str:
    """Return a line of the user's script, and the library's method that the script called there, if it was one.

    What is wrong in a library's own training step is not wrong in the user's line. So a message names both, as in
    `train.py:41, in recommenders.models.Model.train_step (models.py:71)`.
    """
    # The code of the library is still running, whereas an op records neither classes nor modules.
    for frame, number in traceback.walk_stack(inspect.currentframe()):
        whose, own_line = _whose(frame.f_code.co_filename), _shown(frame.f_code.co_filename, number)
        if whose == "user" or (whose == "library" and line == own_line):
            return line
        if whose == "library":
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            # The class whose method runs; the object may be of a subclass.
            classes = [
                each.__name__
                for each in type(frame.f_locals.get("self")).__mro__
                if name in vars(each) and getattr(inspect.unwrap(vars(each)[name]), "__code__", None) is frame.f_code
            ]
            return f"{line}, in {'.'.join([module, *classes[:1], name])} ({own_line})"
    return line


def made_within(op: tf.Operation, *files: str) -> bool:
    """Return whether code in one of these files of a host made the op, called by the user or by another library."""
    # The innermost frame comes first. The search stops at the line that called the host, so that code of the host that
    # called this line, such as Estimator, does not count.
    for frame in reversed(list(op.traceback)):
        if _whose(frame.filename) != "host":
            return False
        if frame.filename.endswith(files):
            return True
    return False


def made_by_tfmp(op: tf.Operation) -> bool:
    """Return whether code of this package made an op, directly or through a library."""
    return any(frame.filename.startswith(_directories("tfmp")) for frame in op.traceback)


def ops_of(grads: Iterable[Any]) -> list[tf.Operation]:
    """Return the ops whose outputs the gradients are. Eager tensors and None have no op and are left out."""
    return [value.op for value in map(lists.values, grads) if tf.is_symbolic_tensor(value)]


def _shown(filename: str, line: int) -> str:
    return f"{os.path.basename(filename)}:{line}"


def _whose(filename: str) -> str:
    """Return "host" for a file of a host framework or of Python, "library" for one of another package, else "user"."""
    # Python's own frozen modules have names like `<frozen runpy>`. Of a file that AutoGraph generated, the traceback of
    # an op names the original line too.
    is_generated = filename.startswith("<frozen") or GENERATED_FILE in filename
    if is_generated or filename.startswith(_directories(*_HOSTS)):
        return "host"
    paths = sysconfig.get_paths()
    # The commands of packages are installed, too; and `site-packages` is a directory inside of the standard library's.
    is_in_own = filename.startswith((paths["purelib"], paths["platlib"], paths["scripts"]))
    if is_in_own or not _INSTALLED.isdisjoint(PurePath(filename).parts):
        return "library"
    return "host" if filename.startswith((paths["stdlib"], paths["platstdlib"])) else "user"


def _directories(*packages: str) -> tuple[str, ...]:
    files = (getattr(sys.modules.get(package), "__file__", None) for package in packages)
    return tuple(os.path.join(os.path.dirname(file), "") for file in files if file)
