"""Rewrites one file and reports on it."""

import ast
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.project_role import ProjectRole
from tfmp.migrate.analysis.tf_version import TfVersion
from tfmp.migrate.cli import files, modules
from tfmp.migrate.cli.unified_diff import unified_diff
from tfmp.migrate.edits.results import Finding
from tfmp.migrate.edits.rewriting import Change, RewritingError, Rewritten, concerns, rewrite

# LibCST visits a tree recursively in Python: 400 chained calls need 3,000 levels. A stack of 8 MB holds more.
_DEEPEST_CALLS = 5000
_NOTEBOOK = (
    "it is a notebook, and its cells are not read. Make a script of it with `jupytext --to py:percent` or `jupyter "
    "nbconvert --to script`, and run this on the script; `jupytext --to ipynb` makes a notebook of it again"
)
_NO_SCRIPT = "its name is not that of a script, and it imports nothing: if it is one, give it a name that ends in .py"
_IPYTHON = "If the line is a command of IPython, such as %matplotlib or !pip, remove it, or make it a comment"
_TABS = "Make spaces of the tabs at the starts of its lines, for example by `expand --initial`"
_OF_IPYTHON = re.compile(r"\s*([%!?]|\w+\s*=\s*[%!])")


class Job(NamedTuple):
    """The work to do on each file: to `write` it, or to make a `diff`.

    With `waits`, a file that does not show its TensorFlow version is not written yet, because other files may show it.
    """

    tensorflow: int | None = None  #: The version, 1 or 2, of a file that does not show it; None if it is not known.
    write: bool = False
    diff: bool = False
    waits: bool = False


class FileReport(NamedTuple):
    """The report of one file. Lines are lines of the file as it is now."""

    path: str
    changes: tuple[Change, ...] = ()  #: The edits that were made, or would be made.
    findings: tuple[Finding, ...] = ()
    diff: bytes = b""  #: If one was asked for, in the encoding of the file.
    encoding: str = "utf-8"
    error: str | None = None  #: The reason why the file was not processed; None if it was.
    error_line: int | None = None
    module: modules.Module | None = None  #: None if the file was not processed.
    role: ProjectRole | None = None  #: The role of the original file; None if the file does not concern any rule.

    @property
    def waits(self) -> bool:
        """Whether the file does not show its TensorFlow version, so that other files may decide it."""
        return self.role is not None and self.role.version in (TfVersion.AMBIGUOUS, TfVersion.NEUTRAL)


def process(found: files.Found, job: Job) -> FileReport:
    """Rewrite a file; return its report. It raises for no file: the report tells what went wrong."""
    if found.error is not None:
        return FileReport(found.path, error=found.error)
    line = None
    try:
        return _process(found.path, job)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        advice = _TABS if isinstance(error, TabError) else _advice(found.path, error.text or "")
        message, line = f"Python {version} cannot parse it ({error.msg}). {advice}", error.lineno
    except cst.ParserSyntaxError as error:
        message, line = _unparsed(found.path, error)
    except (files.UnusableFileError, RewritingError) as error:
        message = str(error)
    except (RecursionError, MemoryError):
        message = "its expressions are nested too deep to be rewritten"
    except Exception as error:  # one file must not end the work on all the others
        message = f"{type(error).__name__}: {' '.join(str(error).split())}: this is a defect of tfmp, report it"
    return FileReport(found.path, error=message, error_line=line)


def _advice(path: str, line: str) -> str:
    """Return what to do with a file that Python cannot parse, from the line that it stops at."""
    if not files.is_named_as_python(path):
        return "Its name is not that of a script either"
    return _IPYTHON if _OF_IPYTHON.match(line) else "If it is Python 2, run 2to3 or futurize first"


def _unparsed(path: str, error: cst.ParserSyntaxError) -> tuple[str, int]:
    """Return why LibCST cannot parse a file that Python can parse, and the line."""
    mixed = _mixed_line(files.read(path)[0]) if "tokenizer error" in error.message else None
    if mixed is not None:
        return f"LibCST, which edits it, cannot parse its mix of tabs and spaces, which begins here. {_TABS}", mixed
    # At the end of a line, `raw_line` is the number of the next line; only the message has the right number.
    said = re.search(r"error at (\d+):", error.message)
    line = int(said[1]) if said else error.raw_line
    return "LibCST, which edits it, cannot parse this line, though Python can", line


def _mixed_line(text: str) -> int | None:
    """Return the first line whose indentation is not of the first character that indents; None without one."""
    lines = re.split(r"\r\n?|\n", text)
    starts = sorted({node.lineno for node in ast.walk(_parsed(text)) if isinstance(node, ast.stmt)})
    indents = {number: lines[number - 1].partition(lines[number - 1].strip())[0] for number in starts}
    first = "".join(indents.values())[:1]
    return next((number for number, indent in indents.items() if indent.strip(first)), None)


def _process(path: str, job: Job) -> FileReport:
    text, encoding = files.read(path)
    if files.is_notebook(path):
        if concerns(files.notebook_code(text)):
            raise files.UnusableFileError(_NOTEBOOK)
        return FileReport(path, encoding=encoding, module=modules.Module())
    module = _module(text, must_be_code=not files.is_named_as_python(path))
    # LibCST drops form feeds at the start of a file.
    script = text.lstrip("\f")
    lead = text.removesuffix(script)
    star_names = modules.star_names(os.path.abspath(path), module.imports)
    done = _rewrite(script, job.tensorflow, star_names)
    report = FileReport(path, done.changes, done.findings, encoding=encoding, module=module, role=done.role)
    if not done.changes or (job.write and job.waits and report.waits):
        return report
    before, after = files.encode(text, encoding), files.encode(lead + done.text, encoding)
    if not job.write:
        return report._replace(diff=unified_diff(path, before, after) if job.diff else b"")
    files.replace(path, before, after)
    changes = tuple(change._replace(line=change.written_line) for change in done.changes)
    # The findings of the written file, so that all lines, also those in messages, are lines of the file as it is now.
    findings = _rewrite(done.text, job.tensorflow, star_names).findings
    return report._replace(changes=changes, findings=findings, module=_module(done.text, must_be_code=False))


def _module(text: str, *, must_be_code: bool) -> modules.Module:
    try:
        module = modules.read(_parsed(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # LibCST accepts some of Python 2, and deeply nested expressions end its process.
        if must_be_code or concerns(text):
            raise
        return modules.Module()
    # Much of what is JSON, YAML or a list of packages is an expression of Python too.
    if must_be_code and not module.imports:
        raise files.UnusableFileError(_NO_SCRIPT)
    return module


def _parsed(text: str) -> ast.Module:
    with warnings.catch_warnings():
        # Warnings about the script's own code, such as invalid escapes, must not appear.
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _rewrite(text: str, tensorflow: int | None, star_names: Mapping[str, frozenset[str]]) -> Rewritten:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST_CALLS))
    try:
        return rewrite(text, tensorflow, star_names)
    finally:
        sys.setrecursionlimit(before)
