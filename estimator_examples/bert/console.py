"""Lines and progress bars that share standard output without overwriting each other."""

import contextlib
import logging
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm


def say(text: str) -> None:
    """Print a text above the progress bar, if there is one; on a terminal, long lines are wrapped between words.

    Args:
        text: One line or several.
    """
    width = _width()
    lines = text.splitlines()
    if width:
        lines = [part for line in lines for part in _wrapped(line, width)]
    tqdm.tqdm.write("\n".join(lines), file=sys.stdout)
    sys.stdout.flush()


def bar(iterable: Iterable[Any] | None = None, **settings: Any) -> tqdm.tqdm:  # noqa: ANN401 - tqdm's own
    """Make a progress bar, which is shown on a terminal only.

    Args:
        iterable: The items that the bar counts; None for a bar that the caller updates.
        **settings: Further arguments of `tqdm.tqdm`.
    """
    # tqdm's default is standard error. tox reads that as a second stream, so that the bar and the lines would appear in
    # any order, and prints it in red.
    return tqdm.tqdm(iterable, file=sys.stdout, disable=None, dynamic_ncols=True, **settings)


@contextlib.contextmanager
def logs_as_lines(*loggers: logging.Logger) -> Iterator[None]:
    """Within this context, print the records of some loggers by `say`, instead of by the loggers' own handlers."""
    handlers = [(logger, logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.handlers = [_LineHandler()]
    try:
        yield
    finally:
        for logger, before in handlers:
            logger.handlers = before


class _LineHandler(logging.Handler):
    """Prints log records by `say`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        say(self.format(record))


def _width() -> int:
    """Return the number of columns of the terminal; 0 if standard output is not a terminal."""
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0


def _wrapped(line: str, width: int) -> list[str]:
    # Names and paths are not broken, so that they can be copied.
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) or [""]
