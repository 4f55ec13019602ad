"""Finds, reads and replaces Python files on disk."""

import contextlib
import io
import os
import re
import stat
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: Names of directories that are skipped: they hold code of others, or files made by tools.
LEFT_OUT = frozenset(("__pycache__", "build", "node_modules", "site-packages"))

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class UnusableFileError(Exception):
    """A file cannot be read or written; the message is the reason, without a full stop."""


class Found(NamedTuple):
    """A file to process, or a path without one.

    Attributes:
        path: The path in the form in which the user gave it.
        error: The reason why there is no file to process; None for a file.
        is_file: False for a directory without Python files, which does not count as a file.
    """

    path: str
    error: str | None = None
    is_file: bool = True


class Source(NamedTuple):
    """The content of a file.

    Attributes:
        text: The script, with its original line ends.
        encoding: The encoding that the byte order mark or the first lines declare; else UTF-8.
        lead: Form feeds at the start of the file. They are kept apart from the text because LibCST drops them.
    """

    text: str
    encoding: str
    lead: str = ""


def find(paths: Iterable[str]) -> list[Found]:
    """Find the files below the given paths, each once.

    Args:
        paths: Files or directories. A file is taken whatever its name is; a directory stands for all `*.py` below it,
            except hidden files, hidden directories and those in `LEFT_OUT`. A link to a file is followed if it is
            given itself, or if its target is below the same directory. A link to a directory is followed only if it
            is given itself.

    Returns:
        The files in the order of the paths, sorted within a directory, and the paths without a file.

    Example:
        >>> find(["missing.py"])
        [Found(path='missing.py', error='it does not exist', is_file=True)]
    """
    every = [found for path in paths for found in _found_in(path)]
    # A file may be reached by two paths or by a link, and must be edited only once. An entry without an error is
    # preferred, because one path may leave out a file that another path gives.
    first: dict[str, Found] = {}
    for one in sorted(every, key=lambda found: found.error is not None):
        first.setdefault(os.path.realpath(one.path), one)
    taken = {id(one) for one in first.values()}
    return [one for one in every if id(one) in taken]


def read(path: str) -> Source:
    """Read a script.

    Args:
        path: The path of the file.

    Returns:
        The script, from which `encode` makes exactly the bytes of the file.

    Raises:
        UnusableFileError: The file cannot be read, or it is not text.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnusableFileError("it is not a regular file")
        return decode(Path(path).read_bytes())
    except OSError as error:
        raise UnusableFileError(f"it cannot be read: {error.strerror or error}") from error


def decode(content: bytes) -> Source:
    r"""Decode a script.

    Args:
        content: The bytes of a file.

    Returns:
        The script, from which `encode` makes exactly these bytes.

    Raises:
        UnusableFileError: The bytes are not text, or not in the encoding that the file declares.

    Example:
        >>> decode(b"# coding: latin-1\r\nname = '\xe9'")
        Source(text="# coding: latin-1\r\nname = 'é'", encoding='iso-8859-1', lead='')
    """
    if b"\0" in content:
        raise UnusableFileError("it is binary, or in UTF-16: it has zero bytes")
    # Python also ends a line at a lone carriage return when it looks for the encoding declaration.
    unix = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(unix).readline)
    except SyntaxError as error:
        message = f"Python cannot tell its encoding ({error.msg}): name the right one in a coding line"
        raise UnusableFileError(message) from error
    try:
        whole = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = _lines(content[: error.start])
        message = f"line {line} is not {encoding}: name the encoding in a coding line, or convert the file"
        raise UnusableFileError(message) from error
    except (LookupError, ValueError) as error:
        raise UnusableFileError(f"its coding line names {encoding}, which is no encoding of text") from error
    text = whole.lstrip("\f")
    source = Source(text, encoding, whole[: len(whole) - len(text)])
    if encode(source, text) != content:
        raise UnusableFileError(f"decoding it as {encoding} and encoding it again gives other bytes")
    return source


def encode(source: Source, text: str) -> bytes:
    """Encode a script in the encoding of its file.

    Args:
        source: The content as it was read.
        text: The new script.

    Raises:
        UnusableFileError: The encoding has no bytes for a character.
    """
    try:
        return (source.lead + text).encode(source.encoding)
    except (LookupError, ValueError) as error:
        raise UnusableFileError(f"its new text cannot be encoded as {source.encoding}") from error


def replace(path: str, before: bytes, after: bytes) -> None:
    """Replace the content of a file atomically.

    The file keeps its permissions and, if the system allows it, its owner. For a symbolic link, the target is replaced.
    Another hard link to the file keeps the old content.

    Args:
        path: The path of the file.
        before: The bytes of the file as they were read.
        after: The new bytes of the file.

    Raises:
        UnusableFileError: The file cannot be written, or it has changed since it was read. It is left unchanged.
    """
    target = os.path.realpath(path)
    try:
        status = os.stat(target)
        # A file in a writable directory can be replaced even if it is read-only, and root can write every file. That
        # would be a surprise.
        writable = os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
        if not writable or not status.st_mode & _WRITABLE:
            raise UnusableFileError("it cannot be written: it is read-only")
        handle, temporary = _beside(target)
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
    except OSError as error:
        raise UnusableFileError(f"it cannot be written: {error.strerror or error}") from error


def _beside(path: str) -> tuple[int, str]:
    try:
        return tempfile.mkstemp(dir=os.path.dirname(path), prefix=".tfmp-migrate-")
    except PermissionError as error:
        raise UnusableFileError("it cannot be written: its directory cannot be written") from error


def _found_in(path: str) -> Iterator[Found]:
    if not os.path.lexists(path):
        yield Found(path, "it does not exist")
    elif not os.path.isdir(path):
        yield Found(path)
    else:
        below = list(_below(path))
        yield from below or [Found(path, _why_none(path), is_file=False)]


def _below(top: str) -> Iterator[Found]:
    unreadable: list[OSError] = []
    found: list[Found] = []
    real_top = os.path.join(os.path.realpath(top), "")
    for directory, below, names in os.walk(top, onerror=unreadable.append):
        below[:] = (name for name in below if not _is_left_out(name))
        paths = (os.path.join(directory, name) for name in names if name.endswith(".py") and not name.startswith("."))
        found += (_linked(path, real_top) if os.path.islink(path) else Found(path) for path in paths)
    found += (Found(str(error.filename), f"it cannot be read: {error.strerror}", is_file=False) for error in unreadable)
    yield from sorted(found, key=lambda found: Path(found.path).parts)


def _linked(path: str, real_top: str) -> Found:
    target = os.path.realpath(path)
    if target.startswith(real_top):
        return Found(path)
    # Only files inside the given directory are edited: the target of this link may belong to somebody else.
    return Found(
        path, f"it is a link that leads out of the directory, to {target}: give it by name to have it followed"
    )


def _why_none(top: str) -> str:
    holders: set[str] = set()
    for directory, _, names in os.walk(top):
        if any(name.endswith(".py") for name in names):
            parts = Path(os.path.relpath(directory, top)).parts
            holders.update([part for part in parts if part != os.curdir and _is_left_out(part)][:1])
    none = "there is no Python file in this directory"
    return f"{none} outside of {', '.join(sorted(holders))}, left out unless given by name" if holders else none


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name in LEFT_OUT


def _lines(content: bytes) -> int:
    return len(re.findall(rb"\r\n?|\n", content)) + 1
