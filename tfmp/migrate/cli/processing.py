"""Rewrites one file."""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.project_role import ProjectRole
from tfmp.migrate.analysis.tf_version import TfVersion
from tfmp.migrate.cli import files, modules, syntax
from tfmp.migrate.cli.unified_diff import unified_diff
from tfmp.migrate.edits.results import Finding, Options
from tfmp.migrate.edits.rewriting import Change, RewritingError, rewrite

# LibCST visits a tree in Python, some calls for each level: 400 chained calls need 3,000. A stack of 8 MB holds more.
_DEEPEST_CALLS = 5000


class Job(NamedTuple):
    """What to do to each file.

    Attributes:
        options: What the rules are told.
        write: Whether to edit the file in place.
        diff: Whether to return a diff.
        waits: Whether a file that tells no TensorFlow by itself is only looked at: others may tell it.
    """

    options: Options = Options()
    write: bool = False
    diff: bool = False
    waits: bool = False


class FileReport(NamedTuple):
    """What became of a file.

    Attributes:
        path: The file.
        changes: What was changed, or would be. Their `line` is of the file as it is now.
        findings: What was not changed, with lines of the file as it is now.
        diff: The unified diff, if one was asked for, in the encoding of the file.
        encoding: That encoding.
        error: Why nothing was done; None if the file was looked at.
        error_line: The line that the error is about, if it is about one.
        is_file: Whether it counts as a file: a directory that holds none does not.
        module: What it imports; None if nothing was done.
        role: What it is to other files, by what it said before it was edited; None if it is none of ours.
    """

    path: str
    changes: tuple[Change, ...] = ()
    findings: tuple[Finding, ...] = ()
    diff: bytes = b""
    encoding: str = "utf-8"
    error: str | None = None
    error_line: int | None = None
    is_file: bool = True
    module: modules.Module | None = None
    role: ProjectRole | None = None

    @property
    def waits(self) -> bool:
        """Whether other files may tell what it was written for."""
        return self.role is not None and self.role.version in (TfVersion.AMBIGUOUS, TfVersion.NEUTRAL)


def process(found: files.Found, job: Job) -> FileReport:
    """Rewrite a file.

    Args:
        found: The file.
        job: What to do to it.

    Returns:
        What became of it. There is no file for which this raises.

    Example:
        >>> process(files.Found("missing.py"), Job()).error
        'it cannot be read: No such file or directory'
    """
    if found.error is not None:
        return FileReport(found.path, error=found.error, is_file=found.is_file)
    try:
        return _process(found.path, job)
    except syntax.NotPythonError as error:
        return FileReport(found.path, error=str(error), error_line=error.line)
    except cst.ParserSyntaxError as error:
        message = "LibCST, which edits it, cannot parse this line, though Python can"
        return FileReport(found.path, error=message, error_line=_line(error))
    except (files.UnusableFileError, RewritingError) as error:
        message = str(error)
    except RecursionError:
        message = "its expressions are nested too deep to be rewritten"
    except Exception as error:  # one file must not end the work on all the others
        message = f"{type(error).__name__}: {' '.join(str(error).split())}: this is a defect of tfmp, report it"
    return FileReport(found.path, error=message)


def _line(error: cst.ParserSyntaxError) -> int:
    # At the end of a line its `raw_line` is the next one; its message says both right.
    said = re.search(r"error at (\d+):", error.message)
    return int(said[1]) if said else error.raw_line


def _process(path: str, job: Job) -> FileReport:
    source = files.read(path)
    module = modules.read(syntax.check(source.text))
    with _deep_calls():
        done = rewrite(source.text, job.options)
    report = FileReport(path, done.changes, done.findings, encoding=source.encoding, module=module, role=done.role)
    if not done.changes or (job.waits and report.waits):
        return report
    before, after = files.encode(source, source.text), files.encode(source, done.text)
    if not job.write:
        return report._replace(diff=unified_diff(path, before, after) if job.diff else b"")
    files.replace(path, before, after)
    changes = tuple(change._replace(line=change.written_line) for change in done.changes)
    # What is left in the file as it is now: lines in the messages are of that too.
    with _deep_calls():
        left = rewrite(done.text, job.options)
    module = modules.read(syntax.check(done.text))
    return report._replace(changes=changes, findings=left.findings, module=module)


@contextlib.contextmanager
def _deep_calls() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST_CALLS))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
