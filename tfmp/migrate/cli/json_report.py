"""Formats the reports of the files as JSON. The other reports take their numbers from here."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits.results import Level


def json_document(reports: Sequence[FileReport], *, written: bool) -> str:
    r"""Return the report as one JSON document for other tools; the help text of the command says what it holds.

    Lines are counted from 1 in the file as it is now. Bytes of a path that are not UTF-8 are written as `\xff`.

    Examples:
        >>> json.loads(json_document([FileReport("a.py", error="no", error_line=2)], written=False))["files"]
        [{'path': 'a.py', 'changed': False, 'edits': [], 'findings': [], 'error': 'no', 'error_line': 2}]
    """
    summary = {**file_totals(reports), "written": written, "rules": rule_totals(reports)}
    return json.dumps({"files": [_as_json(report) for report in reports], "summary": summary}, indent=2)


def file_totals(reports: Sequence[FileReport]) -> dict[str, int]:
    """Count files: all, those that are or would be rewritten, the others, and those that were not processed."""
    changed = sum(bool(report.changes) for report in reports)
    not_done = sum(report.error is not None for report in reports)
    unchanged = len(reports) - changed - not_done
    return {"files": len(reports), "changed": changed, "unchanged": unchanged, "not_done": not_done}


def rule_totals(reports: Sequence[FileReport]) -> dict[str, dict[str, int]]:
    """Count for each rule the files, the lines that it rewrote or added, and its findings by level."""
    counts: Counter[tuple[str, str]] = Counter()
    for report in reports:
        rules = {one.rule for one in report.changes} | {one.rule for one in report.findings}
        counts.update((rule, "files") for rule in rules)
        # The edits of one line count once.
        rewritten = {
            (one.rule, line + one.line) for one in report.changes for line in range(len(one.before.splitlines()))
        }
        counts.update((rule, "lines") for rule, _ in rewritten)
        counts.update((one.rule, "lines") for one in report.changes if not one.before)
        counts.update((one.rule, one.level.value) for one in report.findings)
    names = ("files", "lines", *(level.value for level in Level))
    every = sorted({rule for rule, _ in counts}, key=order)
    return {rule: {name: counts[rule, name] for name in names} for rule in every}


def order(rule: str) -> tuple[int, str]:
    """Return a key that sorts rules by their numbers: R2 before R10."""
    return int("".join(filter(str.isdigit, rule)) or 0), rule


def _as_json(report: FileReport) -> dict[str, Any]:  # JSON's values are of many types
    edits = [{"rule": one.rule, "line": one.line, "before": one.before, "after": one.after} for one in report.changes]
    return {
        "path": os.fsencode(report.path).decode("utf-8", "backslashreplace"),
        "changed": bool(report.changes),
        "edits": edits,
        "findings": [{**one._asdict(), "level": one.level.value} for one in report.findings],
        "error": report.error,
        "error_line": report.error_line,
    }
