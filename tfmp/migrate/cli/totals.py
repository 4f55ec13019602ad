"""Counts what the reports of a run's files hold."""

from collections import Counter
from collections.abc import Sequence

from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits.results import Level


def file_totals(reports: Sequence[FileReport]) -> dict[str, int]:
    """Count files: all, those that are or would be rewritten, the others, and those that were not processed."""
    # A directory without Python files does not count.
    every = [report for report in reports if report.is_file]
    changed = sum(bool(report.changes) for report in every)
    not_done = sum(report.error is not None for report in every)
    unchanged = len(every) - changed - not_done
    return {"files": len(every), "changed": changed, "unchanged": unchanged, "not_done": not_done}


def rule_totals(reports: Sequence[FileReport]) -> dict[str, dict[str, int]]:
    """Count for each rule the files, the lines that it rewrote or added, and its findings by level."""
    counts: Counter[tuple[str, str]] = Counter()
    for report in reports:
        counts.update((rule, "files") for rule in _rules(report))
        # The edits of one line count once.
        rewritten = {
            (one.rule, line + one.line) for one in report.changes for line in range(len(one.before.splitlines()))
        }
        counts.update((rule, "lines") for rule, _ in rewritten)
        counts.update((one.rule, "lines") for one in report.changes if not one.before)
        counts.update((one.rule, one.level.value) for one in report.findings)
    names = ("files", "lines", *(level.value for level in Level))
    return {
        rule: {name: counts[rule, name] for name in names} for rule in sorted({rule for rule, _ in counts}, key=order)
    }


def _rules(report: FileReport) -> set[str]:
    return {one.rule for one in report.changes} | {one.rule for one in report.findings}


def order(rule: str) -> tuple[int, str]:
    """Return a key that sorts rules by their numbers: R2 before R10."""
    return int("".join(filter(str.isdigit, rule)) or 0), rule
