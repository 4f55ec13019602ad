"""The command line: `python -m tfmp.migrate PATH...`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tfmp.environment import require

if TYPE_CHECKING:
    from tfmp.migrate.cli.processing import FileReport

# Fewer files are done before a progress bar is useful.
_FILES_WORTH_PROGRESS = 20

_DESCRIPTION = """\
Rewrites legacy TensorFlow 1 scripts where the rewrite is certain, and lists what is left for a person. TensorFlow is
not needed.

Without an option it writes no file. It prints what is left for a person, the worst first: what trains wrongly without
an error, what fails, and what is good to know. Then follow a unified diff of the rewrites (with --write, the names of
the written files) and the totals. Line numbers are those of the file as it is; with --write, those of the written
file."""

_EPILOG = """\
What is left is a line `file:line: rule: message`, with the line of code below it, indented. A message about several
places is printed once, as `rule: message`, and a line `file:line: rule: ...` follows for each place. On a terminal,
long lines are wrapped and colours are used, unless NO_COLOR or TERM=dumb is set; FORCE_COLOR colours other output too.

A directory stands for all *.py below it, except hidden files, hidden directories, __pycache__, build, node_modules,
site-packages and links; a link to a file that is not among the others is listed. A file that is given by its name is
always taken; of a link, --write edits the target. A hard link is broken: the other names of the file keep the old
content. A file that cannot be read or parsed is listed, and so is a notebook whose code names TensorFlow: notebooks
are not read, so make scripts of them.
A second run changes nothing more. Lines that are not rewritten keep every byte: line ends, tabs, encoding.

--json prints {"files": [FILE, ...], "summary": {"files", "changed", "unchanged", "not_done", "written", "rules": {"R1":
{"files", "lines", "wrong", "fails", "note"}, ...}}}, where FILE is {"path", "changed", "edits": [{"rule", "line",
"before", "after"}, ...], "findings": [{"rule", "line", "level", "message", "detail"}, ...], "error", "error_line"}. A
level is "wrong", "fails" or "note"; the error is null for a file that was processed.

exit status:
  0  nothing is left for a person. What is good to know does not count, nor do rewrites that --write would make.
  1  something is left: it trains wrongly, it fails, or a file was not done; or the report cannot be printed. With
     --check, a rewrite that is not written yet counts too.
  2  usage: an option that does not exist, options that exclude each other, an empty PATH, or a missing package.
  130  an interrupt (Ctrl-C), SIGTERM or SIGHUP ended the run: the report covers the files finished by then."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process; return the exit status.

    Examples:
        >>> main(["--check", "missing.py"])
        1
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.write and (arguments.check or arguments.diff):
        parser.error("argument --write: not allowed with argument --check or --diff, which write nothing")
    if "" in arguments.paths:
        parser.error("argument PATH: got an empty one; give . for the directory that you are in")
    # A file name or a line of a diff may have characters that the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _interruptible():
            return _run(arguments)
    except ImportError as error:
        _say(f"{_program()}: {error}", error=True)
        return 2
    except KeyboardInterrupt:
        return _interrupted()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(),
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a directory with Python files")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--todo", action="store_true", help="print only what trains wrongly, what fails, and the totals; no diff"
    )
    form.add_argument(
        "--diff",
        action="store_true",
        help="print the diff only, for `patch -p0` or `git apply -p0`; the rest to stderr. Its paths are as given: "
        "give them from where it is to be applied, not absolute",
    )
    form.add_argument("--check", action="store_true", help="only set the exit status; a line of totals to stderr")
    form.add_argument("--json", action="store_true", help="print one JSON document")
    # --write is outside the exclusive group because it can be combined with --todo and --json.
    parser.add_argument("--write", action="store_true", help="edit the files in place")
    return parser


def _program() -> str:
    """Return the name of the program as the user typed it."""
    script = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    return script if script.startswith("tfmp-migrate") else "python -m tfmp.migrate"


def _run(arguments: argparse.Namespace) -> int:
    require("libcst", extra="migrate")
    # Python sets sys.stdout to None if the shell closed it.
    if sys.stdout is None and not arguments.check:
        _say(f"{_program()}: standard output is closed: nothing was done.", error=True)
        return 1
    reports, interrupted = _processed(arguments)
    try:
        _show(arguments, reports)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        return _unreported(error)
    return _interrupted() if interrupted else _status(arguments, reports)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Take a request to end, or a terminal that is closed, as an interrupt: files that were begun are finished."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if is_main and hasattr(signal, name)]
    ending = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _unreported(error: OSError | ValueError) -> int:
    # A program that closes the pipe has read enough, which is not an error.
    if not isinstance(error, BrokenPipeError):
        reason = getattr(error, "strerror", None) or error
        with contextlib.suppress(OSError, ValueError):
            _say(f"{_program()}: the report cannot be printed: {reason}. Files that were written stay so.", error=True)
    # The flush at the end of the process must not fail again.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _interrupted() -> int:
    _say("interrupted: what was done so far is in the report; run it again for the rest.", error=True)
    return 130


def _processed(arguments: argparse.Namespace) -> tuple[list[FileReport], bool]:
    from tfmp.migrate.cli import files, processing, project

    found = files.find(arguments.paths)
    wants_diff = not (arguments.write or arguments.check or arguments.json or arguments.todo)
    job = processing.Job(write=arguments.write, diff=wants_diff)
    is_shown = len(found) >= _FILES_WORTH_PROGRESS and sys.stderr is not None and sys.stderr.isatty()
    if not is_shown or find_spec("tqdm") is None:
        return project.process_run(found, job)
    from tqdm import tqdm

    with tqdm(total=len(found), unit="file", leave=False, file=sys.stderr) as bar:
        return project.process_run(found, job, bar.update)


def _show(arguments: argparse.Namespace, reports: list[FileReport]) -> None:
    from tfmp.migrate.cli import reporting
    from tfmp.migrate.cli.json_report import json_document
    from tfmp.migrate.edits.results import Level

    if arguments.json:
        _say(json_document(reports, written=arguments.write))
        return
    if arguments.check:
        _say(reporting.files_line(reports, written=False), error=True)
        return
    style = reporting.style_for(sys.stderr if arguments.diff else sys.stdout)
    for line in reporting.left_lines(reports, reporting.TO_DO if arguments.todo else Level, style):
        _say(line, error=arguments.diff)
    for report in reports:
        if arguments.diff:
            sys.stdout.buffer.write(report.diff)
        else:
            # This diff is for reading, so all files are shown in the encoding of the terminal.
            text = report.diff.decode(report.encoding, "backslashreplace")
            sys.stdout.write(reporting.coloured_diff(text, style))
    if arguments.write and not arguments.todo:
        for line in reporting.written_lines(reports):
            _say(line)
    shows_diff = not arguments.diff and any(report.diff for report in reports)
    if shows_diff:
        _say("")
    for line in reporting.summary_lines(reports, written=arguments.write):
        _say(line, error=arguments.diff)
    if shows_diff:
        _say("--write makes these rewrites; --todo lists what is left without the diff and the notes.")


def _status(arguments: argparse.Namespace, reports: list[FileReport]) -> int:
    from tfmp.migrate.cli.reporting import TO_DO

    left = any(report.error is not None or any(one.level in TO_DO for one in report.findings) for report in reports)
    return int(left or (arguments.check and any(report.changes for report in reports)))


def _say(line: str, *, error: bool = False) -> None:
    stream = sys.stderr if error else sys.stdout
    if stream is not None:
        stream.write(f"{line}\n")
