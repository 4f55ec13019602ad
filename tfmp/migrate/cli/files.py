"""Finds, reads and replaces Python files on disk."""

import contextlib
import io
import json
import os
import signal
import stat
import tempfile
import threading
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Names of directories that hold code of others, or files made by tools.
_LEFT_OUT = ("__pycache__", "build", "node_modules", "site-packages")
_NOTEBOOK = ".ipynb"
_PYTHONS = frozenset((".py", ".pyw", ".pyi", ""))
_NO_FILES = f"it has no Python file (hidden ones and those in {', '.join(_LEFT_OUT)} do not count)"
# The target may belong to somebody else.
_LINK = "it is a link to a file that is not among those to process: give it by name to have it followed"


class UnusableFileError(Exception):
    """A file cannot be read or written; the message is the reason, without a full stop."""


class Found(NamedTuple):
    """A file to process; or a path without one, for the reason `error`."""

    path: str
    error: str | None = None


def find(paths: Iterable[str]) -> list[Found]:
    """Find the files below the given paths, each once.

    A file is taken whatever its name is. A directory stands for all `*.py` and all notebooks below it, sorted, except
    what is hidden or in the directories of `_LEFT_OUT`. A link is followed only if it is given itself.
    """
    every = [found for path in paths for found in _found_in(path)]
    # A file may be reached by two paths or by a link, and must be edited only once. An entry without an error is
    # preferred, because one path may leave out a file that another path gives.
    first: dict[str, Found] = {}
    for one in sorted(every, key=lambda found: found.error is not None):
        first.setdefault(os.path.realpath(one.path), one)
    taken = {id(one) for one in first.values()}
    return [one for one in every if id(one) in taken]


def read(path: str) -> tuple[str, str]:
    """Return the text of a script, with its line ends, and its encoding.

    Raises:
        UnusableFileError: The file cannot be read, or it is not text.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnusableFileError("it is not a regular file")
        return decode(Path(path).read_bytes())
    except OSError as error:
        raise UnusableFileError(f"it cannot be read: {error.strerror or error}") from error


def decode(content: bytes) -> tuple[str, str]:
    """Decode a script by its coding line, or as UTF-8, so that `encode` makes exactly these bytes of it."""
    if b"\0" in content:
        raise UnusableFileError("it is binary, or in UTF-16: it has zero bytes")
    # Python also ends a line at a lone carriage return when it looks for the encoding declaration.
    unix = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(unix).readline)
        text = content.decode(encoding)
    except (SyntaxError, LookupError, ValueError) as error:
        message = f"it cannot be decoded: {error}. Convert it, or name its encoding in a coding line"
        raise UnusableFileError(message) from error
    if encode(text, encoding) != content:
        raise UnusableFileError(f"decoding it as {encoding} and encoding it again gives other bytes")
    return text, encoding


def encode(text: str, encoding: str) -> bytes:
    """Encode a text, or raise an `UnusableFileError` because the encoding has no bytes for a character."""
    try:
        return text.encode(encoding)
    except (LookupError, ValueError) as error:
        raise UnusableFileError(f"its new text cannot be encoded as {encoding}") from error


def is_notebook(path: str) -> bool:
    """Tell whether a file is a notebook, by its name."""
    return path.lower().endswith(_NOTEBOOK)


def is_named_as_python(path: str) -> bool:
    """Tell whether the name of a file may be that of a script."""
    return os.path.splitext(path)[1].lower() in _PYTHONS


def notebook_code(text: str) -> str:
    """Return the code of a notebook: that of all cells that hold code.

    Raises:
        UnusableFileError: The text is not that of a notebook.

    Examples:
        >>> notebook_code('{"cells": [{"cell_type": "code", "source": ["x = 1"]}, {"cell_type": "markdown"}]}')
        'x = 1'
    """
    try:
        content = json.loads(text)
        # The cells of format 3 are in worksheets, with their code as `input`.
        sheets = [content, *content.get("worksheets", ())]
        cells = [cell for sheet in sheets for cell in sheet.get("cells", ()) if cell["cell_type"] == "code"]
        return "\n".join("".join(cell.get("source", cell.get("input", ""))) for cell in cells)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnusableFileError("it is no notebook, though it is named as one") from error


def replace(path: str, before: bytes, after: bytes) -> None:
    """Replace the content of a file atomically.

    The file keeps its permissions and, if the system allows it, its owner. For a symbolic link, the target is replaced.
    Another hard link to the file keeps the old content.

    Raises:
        UnusableFileError: The file cannot be written, or it has changed since it was read. It is left unchanged.
    """
    target = os.path.realpath(path)
    try:
        status = os.stat(target)
        # A file in a writable directory can be replaced even if it is read-only, and root can write every file. That
        # would be a surprise.
        writable = os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
        if not writable or not status.st_mode & 0o222:
            raise UnusableFileError("it cannot be written: it is read-only")
        with held(signal.SIGTERM):
            _replace(target, status, before, after)
    except OSError as error:
        raise UnusableFileError(f"it cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def held(number: signal.Signals) -> Iterator[None]:
    """Hold back a signal, here and in processes that are started here. Windows has no such thing."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    came: list[int] = []
    # The mask is of one thread: the system may give the signal to another, and Python handles it in the main one.
    handler = signal.getsignal(number)
    is_handled = callable(handler) and threading.current_thread() is threading.main_thread()
    if is_handled:
        signal.signal(number, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_handled:
            signal.signal(number, handler)
        if came:
            signal.raise_signal(number)


def _replace(target: str, status: os.stat_result, before: bytes, after: bytes) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".tfmp-migrate-")
    except PermissionError as error:
        raise UnusableFileError("it cannot be written: its directory cannot be written") from error
    try:
        with open(handle, "wb") as file:
            file.write(after)
        with contextlib.suppress(OSError, AttributeError):
            os.chown(temporary, status.st_uid, status.st_gid)
        os.chmod(temporary, stat.S_IMODE(status.st_mode))
        if Path(target).read_bytes() != before:
            raise UnusableFileError("it changed meanwhile: run this again")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _found_in(path: str) -> Iterator[Found]:
    if not os.path.lexists(path):
        yield Found(path, "it does not exist")
    elif not os.path.isdir(path):
        yield Found(path)
    else:
        yield from _below(path) or [Found(path, _NO_FILES)]


def _below(top: str) -> list[Found]:
    unreadable: list[OSError] = []
    found: list[Found] = []
    for directory, below, names in os.walk(top, onerror=unreadable.append):
        below[:] = (name for name in below if not name.startswith(".") and name not in _LEFT_OUT)
        own = (name for name in names if not name.startswith(".") and (name.endswith(".py") or is_notebook(name)))
        paths = (os.path.join(directory, name) for name in own)
        found += (Found(path, _LINK) if os.path.islink(path) else Found(path) for path in paths)
    found += (Found(str(error.filename), f"it cannot be read: {error.strerror}") for error in unreadable)
    return sorted(found, key=lambda found: Path(found.path).parts)
