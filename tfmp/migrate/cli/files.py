"""Python files on disk: which there are, what they say, and how they are replaced."""

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

#: Directories below a given one that hold what others wrote, or what a tool made.
LEFT_OUT = frozenset(("__pycache__", "build", "node_modules", "site-packages"))

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class UnusableFileError(Exception):
    """A file that is left alone; the text says why, in a sentence without a full stop."""


class Found(NamedTuple):
    """A file to look at, or a path that holds none.

    Attributes:
        path: The path, as the user would write it.
        error: Why there is nothing to look at; None for a file.
        is_file: Whether it counts as a file: a directory that holds none does not.
    """

    path: str
    error: str | None = None
    is_file: bool = True


class Source(NamedTuple):
    """What a file says.

    Attributes:
        text: The script, with its line ends as they are.
        encoding: The encoding that its byte order mark or its first lines name; else UTF-8.
        lead: Form feeds that the file starts with. They are no part of the text: LibCST drops them.
    """

    text: str
    encoding: str
    lead: str = ""


def find(paths: Iterable[str]) -> list[Found]:
    """Find the files that paths stand for, each once.

    Args:
        paths: Files, which are taken whatever their names are, or directories, of which all `*.py` below are. Hidden
            files, hidden directories, and those in `LEFT_OUT` are left out there. A link to a file is followed if it
            is given, or leads to what is below the same directory; a link to a directory only if it is given.

    Returns:
        The files in the order of the paths, those of a directory sorted; and what held none.

    Example:
        >>> find(["missing.py"])
        [Found(path='missing.py', error='it does not exist', is_file=True)]
    """
    every = [found for path in paths for found in _found_in(path)]
    # A file may be reached by two paths, or by a link: two edits of one file would be one too many. One that is left
    # out by one path may be taken by another.
    first: dict[str, Found] = {}
    for one in sorted(every, key=lambda found: found.error is not None):
        first.setdefault(os.path.realpath(one.path), one)
    taken = {id(one) for one in first.values()}
    return [one for one in every if id(one) in taken]


def read(path: str) -> Source:
    """Read a script.

    Args:
        path: The file.

    Returns:
        The script, from which `encode` makes exactly the bytes of the file.

    Raises:
        UnusableFileError: It cannot be read, or it is not text.
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
        UnusableFileError: These bytes are no text, or not in the encoding that the file names.

    Example:
        >>> decode(b"# coding: latin-1\r\nname = '\xe9'")
        Source(text="# coding: latin-1\r\nname = 'é'", encoding='iso-8859-1', lead='')
    """
    if b"\0" in content:
        raise UnusableFileError("it is binary, or in UTF-16: it has zero bytes")
    # Python ends a line at a lone CR too, when it looks for the encoding.
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
    """Encode a script as the file is that it came from.

    Args:
        source: What the file says.
        text: What it is to say.

    Raises:
        UnusableFileError: The encoding has no bytes for a character.
    """
    try:
        return (source.lead + text).encode(source.encoding)
    except (LookupError, ValueError) as error:
        raise UnusableFileError(f"its new text cannot be encoded as {source.encoding}") from error


def replace(path: str, before: bytes, after: bytes) -> None:
    """Replace what a file says, whole or not at all.

    The file keeps its permissions and, where that is allowed, its owner. Of a symbolic link the target is replaced.
    Another hard link to the file keeps the old content.

    Args:
        path: The file.
        before: Its bytes, as they were read.
        after: Its new bytes.

    Raises:
        UnusableFileError: It cannot be written, or it says something else by now. It is as it was then.
    """
    target = os.path.realpath(path)
    try:
        status = os.stat(target)
        # A directory lets its files be replaced even if they themselves are protected, and root may write all: that
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
    # What is edited should be what was given: this may be a file of others.
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
