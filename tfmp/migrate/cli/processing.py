"""Rewrites one file and reports on it."""

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

# LibCST visits a tree recursively in Python: 400 chained calls need 3,000 levels. A stack of 8 MB holds more.
_DEEPEST_CALLS = 5000


class Job(NamedTuple):
    """The work to do on each file.

    Attributes:
        options: The options of the rules.
        write: True to edit the file in place.
        diff: True to return a diff.
        waits: True to only read a file that does not show its TensorFlow version, because other files may show it.
    """

    options: Options = Options()
    write: bool = False
    diff: bool = False
    waits: bool = False


class FileReport(NamedTuple):
    """The report of one file.

    Attributes:
        path: The path of the file.
        changes: The edits that were made, or would be made. Their `line` is a line of the file as it is now.
        findings: The findings, with lines of the file as it is now.
        diff: The unified diff, if one was asked for, in the encoding of the file.
        encoding: The encoding of the file.
        error: The reason why the file was not processed; None if it was.
        error_line: The line that caused the error; None if no line did.
        is_file: False for a directory without Python files, which does not count as a file.
        module: The imports of the file; None if it was not processed.
        role: The role of the original file in its project; None if the file does not concern any rule.
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
        """Whether the file does not show its TensorFlow version, so that other files may decide it."""
        return self.role is not None and self.role.version in (TfVersion.AMBIGUOUS, TfVersion.NEUTRAL)


def process(found: files.Found, job: Job) -> FileReport:
    """Rewrite a file.

    Args:
        found: The file.
        job: The work to do on the file.

    Returns:
        The report of the file. This function raises for no file.

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
    # At the end of a line, `raw_line` is the number of the next line; only the message has the right number.
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
    # The findings of the written file, so that all lines, also those in messages, are lines of the file as it is now.
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
