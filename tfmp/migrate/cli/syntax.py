"""Says why a text is not Python 3."""

import ast
import re
import sys
import warnings

# What Python 2 had. Looked for in the line that Python 3 stumbles over only, so it may be broad.
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

# Where they are no keywords: not before what they belong to, or behind a dot, or behind what names something.
_KEYWORDS = re.compile(
    r"""\basync\b(?!\s+(def|for|with)\b)
    | \bawait\b\s*([=.,:)\]]|$)
    | (\.|\b(def|class|import|as)\s)\s*(async|await)\b
    """,
    re.VERBOSE,
)


class NotPythonError(Exception):
    """A text that Python does not read.

    Attributes:
        line: The line that it stumbles over, from 1; None if it is none in particular.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def check(text: str) -> ast.Module:
    """Return the syntax tree of a text; raise unless it is Python 3.

    LibCST is no judge of that: it takes `except Error, name:` for Python 3, and expressions nested some thousand deep
    end its process.

    Args:
        text: A script.

    Raises:
        NotPythonError: It is not. The message says what it seems to be instead.

    Example:
        >>> try:
        ...     check("print 1")
        ... except NotPythonError as error:
        ...     print(error)
        Python 2: run 2to3 or futurize first
    """
    try:
        with warnings.catch_warnings():
            # Of an odd escape in a string, say: it is the script's own matter.
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
