"""Formats the reports of the files, as lines of text or as JSON."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits.results import Finding, Level
from tfmp.migrate.edits.rewriting import Change

_LONGEST_TEXT = 60


class RuleTotals(NamedTuple):
    """The totals of one rule.

    Attributes:
        files: The number of files that the rule changed or has findings in.
        lines: The number of lines that the rule rewrote or added.
        wrong: The number of findings without which the script trains wrongly.
        fails: The number of findings without which the script fails.
        note: The number of findings that are only for information.
    """

    files: int
    lines: int
    wrong: int
    fails: int
    note: int


class FileTotals(NamedTuple):
    """The totals of all files.

    Attributes:
        files: The number of files. A directory without Python files does not count.
        changed: The number of files that were rewritten, or would be.
        unchanged: The number of files in which no rule rewrites anything.
        not_done: The number of files that were not processed.
    """

    files: int
    changed: int
    unchanged: int
    not_done: int


def report_lines(reports: Iterable[FileReport]) -> Iterator[str]:
    """Yield a line for each change and finding: `file:line: rule: what and why`.

    Args:
        reports: The reports of the files.

    Example:
        >>> print(*report_lines([FileReport("a.py", error="it is read-only")]))
        a.py: not done: it is read-only.
    """
    for report in reports:
        if report.error is not None:
            line = "" if report.error_line is None else f"{report.error_line}:"
            yield f"{report.path}:{line} not done: {report.error}."
            continue
        said: list[Change | Finding] = [*report.changes, *report.findings]
        for one in sorted(said, key=lambda one: one.line):
            what = _rewritten(one) if isinstance(one, Change) else _found(one)
            yield f"{report.path}:{one.line}: {one.rule}: {what}"


def summary_lines(reports: Sequence[FileReport], *, written: bool) -> Iterator[str]:
    """Yield the lines of a table of the rules, then a line about the files.

    Args:
        reports: The reports of the files.
        written: True if the changes were written to the files.
    """
    totals = rule_totals(reports)
    if totals:
        rows = [["rule", "files", "lines rewritten", "trains wrongly", "fails", "notes"]]
        rows += [[rule, *map(str, row)] for rule, row in totals.items()]
        yield from _aligned(rows)
    yield files_line(reports, written=written)


def files_line(reports: Iterable[FileReport], *, written: bool) -> str:
    """Return a line with the numbers of files.

    Args:
        reports: The reports of the files.
        written: True if the changes were written to the files.

    Example:
        >>> files_line([FileReport("a.py"), FileReport("b.py", error="it is read-only")], written=False)
        '2 files: 0 to be rewritten, 1 unchanged, 1 not done'
    """
    totals = file_totals(reports)
    number = "1 file" if totals.files == 1 else f"{totals.files} files"
    changed = f"{totals.changed} {'rewritten' if written else 'to be rewritten'}"
    return f"{number}: {changed}, {totals.unchanged} unchanged, {totals.not_done} not done"


def json_document(reports: Sequence[FileReport], *, written: bool) -> str:
    r"""Return the report as one JSON document for other tools.

    The document is an object with two members. `files` has an object for each path:

    - `path`: a string; bytes in it that are not UTF-8 are written as `\xff`.
    - `changed`: true if the file was rewritten, or would be.
    - `edits`: objects with `rule`, `line`, `before` and `after`.
    - `findings`: objects with `rule`, `line`, `level` (`wrong`, `fails` or `note`) and `message`.
    - `error`: the reason why the file was not processed, or null; `error_line`: the line that caused it, or null.

    Lines are counted from 1 in the file as it is now. `summary` has the members of `FileTotals`, the member `written`,
    and `rules`, which has the members of `RuleTotals` for each rule.

    Args:
        reports: The reports of the files.
        written: True if the changes were written to the files.

    Example:
        >>> json.loads(json_document([FileReport("a.py", error="no", error_line=2)], written=False))["files"]
        [{'path': 'a.py', 'changed': False, 'edits': [], 'findings': [], 'error': 'no', 'error_line': 2}]
    """
    summary = {
        **file_totals(reports)._asdict(),
        "written": written,
        "rules": {rule: row._asdict() for rule, row in rule_totals(reports).items()},
    }
    return json.dumps({"files": [_as_json(report) for report in reports], "summary": summary}, indent=2)


def rule_totals(reports: Iterable[FileReport]) -> dict[str, RuleTotals]:
    """Return the totals of each rule, in the order of the rules' numbers.

    Args:
        reports: The reports of the files.
    """
    every = list(reports)
    rules = {change.rule for report in every for change in report.changes}
    rules |= {finding.rule for report in every for finding in report.findings}
    return {rule: _totals(rule, every) for rule in sorted(rules, key=_number)}


def file_totals(reports: Iterable[FileReport]) -> FileTotals:
    """Return the totals of all files.

    Args:
        reports: The reports of the files.
    """
    every = [report for report in reports if report.is_file]
    not_done = sum(report.error is not None for report in every)
    changed = sum(bool(report.changes) for report in every)
    return FileTotals(len(every), changed, len(every) - changed - not_done, not_done)


def _totals(rule: str, reports: Iterable[FileReport]) -> RuleTotals:
    files = lines = wrong = fails = note = 0
    for report in reports:
        changes = [change for change in report.changes if change.rule == rule]
        levels = [finding.level for finding in report.findings if finding.rule == rule]
        files += bool(changes or levels)
        lines += len({line for change in changes for line in _lines(change)})
        lines += sum(not change.before for change in changes)
        wrong += levels.count(Level.WRONG)
        fails += levels.count(Level.FAILS)
        note += levels.count(Level.NOTE)
    return RuleTotals(files, lines, wrong, fails, note)


def _rewritten(change: Change) -> str:
    before, after = _short(change.before), _short(change.after)
    if not before:
        return f"added `{after}`"
    return f"`{before}` becomes `{after}`" if after else f"removed `{before}`"


def _found(finding: Finding) -> str:
    return f"note: {finding.text}" if finding.level is Level.NOTE else finding.text


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 3]}..."


def _lines(change: Change) -> range:
    return range(change.line, change.line + len(change.before.splitlines()))


def _number(rule: str) -> tuple[int, str]:
    digits = "".join(letter for letter in rule if letter.isdigit())
    return int(digits or 0), rule


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for rule, *numbers in rows:
        columns = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join([rule.ljust(widths[0]), *columns])


def _as_json(report: FileReport) -> dict[str, Any]:  # JSON's values are of many types
    return {
        "path": os.fsencode(report.path).decode("utf-8", "backslashreplace"),
        "changed": bool(report.changes),
        "edits": [
            {"rule": change.rule, "line": change.line, "before": change.before, "after": change.after}
            for change in report.changes
        ],
        "findings": [
            {"rule": one.rule, "line": one.line, "level": one.level.value, "message": one.text}
            for one in report.findings
        ],
        "error": report.error,
        "error_line": report.error_line,
    }
