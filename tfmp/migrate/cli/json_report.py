"""Formats the reports of the files as JSON."""

import json
import os
from collections.abc import Sequence
from typing import Any

from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.cli.totals import file_totals, rule_totals


def json_document(reports: Sequence[FileReport], *, written: bool) -> str:
    r"""Return the report as one JSON document for other tools; the help text of the command says what it holds.

    Lines are counted from 1 in the file as it is now. Bytes of a path that are not UTF-8 are written as `\xff`.

    Example:
        >>> json.loads(json_document([FileReport("a.py", error="no", error_line=2)], written=False))["files"]
        [{'path': 'a.py', 'changed': False, 'edits': [], 'findings': [], 'error': 'no', 'error_line': 2}]
    """
    summary = {**file_totals(reports), "written": written, "rules": rule_totals(reports)}
    return json.dumps({"files": [_as_json(report) for report in reports], "summary": summary}, indent=2)


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
