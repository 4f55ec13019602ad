"""Lines and progress bars that share standard output, and never break each other."""

import contextlib
import logging
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm


def say(text: str) -> None:
    """Print a text above the bar, if there is one; on a terminal, lines end between words.

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
    """Make a progress bar, which shows on a terminal only.

    Args:
        iterable: What to count; None for a bar that is moved by hand.
        **settings: Arguments of `tqdm.tqdm`.
    """
    # tqdm's default is standard error. tox reads that as another stream, so that the bar and the lines arrive in any
    # order, and paints it red.
    return tqdm.tqdm(iterable, file=sys.stdout, disable=None, dynamic_ncols=True, **settings)


@contextlib.contextmanager
def logs_as_lines(*loggers: logging.Logger) -> Iterator[None]:
    """Print what the loggers are told by `say`, in place of what their own handlers do with it."""
    handlers = [(logger, logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.handlers = [_LineHandler()]
    try:
        yield
    finally:
        for logger, before in handlers:
            logger.handlers = before


class _LineHandler(logging.Handler):
    """Prints records as lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        say(self.format(record))


def _width() -> int:
    """Return the columns of the terminal, 0 if there is none."""
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0


def _wrapped(line: str, width: int) -> list[str]:
    # Names and paths stay whole: somebody may want to copy them.
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) or [""]
