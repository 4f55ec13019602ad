"""Checks that a text is Python 3, and explains why it is not."""

import ast
import re
import sys
import warnings

# Syntax of Python 2. Only the line that Python 3 cannot parse is searched, so the patterns may be broad.
_PYTHON_2 = re.compile(
    r"""\b(print|exec)\b\s*[^\s(=.,:)\]]
    | \bexcept\b[^:()]+,\s*\w+\s*:
    | \braise\s+[\w.]+\s*,
    | \bdef\s+\w+\s*\(([^()=]*,)?\s*\(
    | \blambda\s*\(
    | <> | `
    | (?<![\w.])0[0-7]+\b(?!\.)
    | \b(\d+|0[xX][0-9a-fA-F]+)[lL]\b
    | \b[uU][rR]['"]
    """,
    re.VERBOSE,
)

# `async` and `await` used as names: outside of their statements, after a dot, or where something is named.
_KEYWORDS = re.compile(
    r"""\basync\b(?!\s+(def|for|with)\b)
    | \bawait\b\s*([=.,:)\]]|$)
    | (\.|\b(def|class|import|as)\s)\s*(async|await)\b
    """,
    re.VERBOSE,
)


class NotPythonError(Exception):
    """A text is not valid Python 3.

    Attributes:
        line: The line that cannot be parsed, from 1; None if no single line is the cause.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def check(text: str) -> ast.Module:
    """Return the syntax tree of a text, or raise if it is not Python 3.

    LibCST cannot decide this: it accepts `except Error, name:`, and expressions nested several thousand levels deep
    end its process.

    Args:
        text: A script.

    Raises:
        NotPythonError: The text is not Python 3. The message says what it seems to be instead.

    Example:
        >>> try:
        ...     check("print 1")
        ... except NotPythonError as error:
        ...     print(error)
        Python 2: run 2to3 or futurize first
    """
    try:
        with warnings.catch_warnings():
            # Warnings about the script's own code, such as invalid escapes, must not appear.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise NotPythonError(_why(text, error), error.lineno) from error
    except (RecursionError, MemoryError) as error:
        raise NotPythonError("its expressions are nested too deep to be read") from error
    except ValueError as error:
        raise NotPythonError(f"Python does not read it: {error}") from error


def _why(text: str, error: SyntaxError) -> str:
    lines = re.split(r"\r\n?|\n", text)
    line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
    if isinstance(error, TabError):
        return "tabs and spaces are mixed in its indentation, which Python 3 refuses: expand the tabs first"
    if _PYTHON_2.search(line):
        return "Python 2: run 2to3 or futurize first"
    if _KEYWORDS.search(line):
        return "async and await are keywords since Python 3.7: give what has such a name another one first"
    version = ".".join(map(str, sys.version_info[:2]))
    return f"Python {version} cannot parse it: {error.msg}"
