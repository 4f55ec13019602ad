"""A terminal that receives the standard output of an example."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from typing import TextIO

_ROWS = 24
_PARTS = re.compile(r"\r|\n|\x1b\[A|[^\r\n\x1b]+")


class Terminal:
    """The text that was written to a terminal, as its user sees it.

    Attributes:
        columns: The width of the terminal.
        stdout: The file to write to.
        broken: The lines that were too long for a row.
    """

    def __init__(self, columns: int, stdout: TextIO) -> None:
        self.columns = columns
        self.stdout = stdout
        self.written = ""
        self.broken: list[str] = []

    def rows(self) -> list[str]:
        """Return all rows from the first one, including those that have scrolled out of view."""
        rows, row, column = [""], 0, 0
        for part in _PARTS.findall(self.written):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                rows += [""] * (row == len(rows))
            elif part == "\x1b[A":
                row -= 1
            else:
                rows[row] = rows[row].ljust(column)[:column] + part + rows[row][column + len(part) :]
                column += len(part)
                if column > self.columns:
                    self.broken.append(rows[row])
        return [line.rstrip() for line in rows]


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[Terminal]:
    """Open a terminal; its text is complete when the context ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    chunks: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, chunks), daemon=True)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as stdout:
        shown = Terminal(columns, stdout)
        yield shown
    reader.join()
    os.close(ours)
    shown.written = b"".join(chunks).decode()


def _read_all(descriptor: int, chunks: list[bytes]) -> None:
    # Linux raises an error in the reader when the other side is closed.
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)
