"""What is counted of the reports."""

from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.cli.totals import file_totals, rule_totals
from tfmp.migrate.edits.results import Finding, Level
from tfmp.migrate.edits.rewriting import Change


def test_edits_of_one_line_count_once_and_rules_are_in_order() -> None:
    changes = (
        Change("R2", 3, "a", "b", 3),
        Change("R2", 3, "c", "d", 3),
        Change("R2", 4, "", "import tfmp\n", 4),
        Change("R2", 5, "two\nlines", "", 6),
    )
    reports = [
        FileReport("a.py", changes, (Finding("R10", 1, Level.WRONG, "It is wrong."),)),
        FileReport("b.py", error="it is read-only"),
        FileReport("empty", error="it has no Python file", is_file=False),
    ]
    assert [*rule_totals(reports).items()] == [
        ("R2", {"files": 1, "lines": 4, "wrong": 0, "fails": 0, "note": 0}),
        ("R10", {"files": 1, "lines": 0, "wrong": 1, "fails": 0, "note": 0}),
    ]
    assert file_totals(reports) == {"files": 2, "changed": 1, "unchanged": 0, "not_done": 1}
