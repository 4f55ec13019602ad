"""Scripts before and after the rewrite, which lie as text files in a folder beside the test of their module."""

from pathlib import Path

import pytest

from tfmp.migrate.edits.rewriting import rewrite

_TESTS = Path(__file__).parents[1]


class RuleCase:
    """A script before, the script after, and the report: a line `line: rule: level: message` for each finding.

    Without an "after" the script stays unchanged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        parts: dict[str, str] = {}
        for part in path.read_text().split("=== ")[1:]:
            name, _, text = part.partition("\n")
            parts[name.strip()] = text
        assert parts.keys() <= {"before", "after", "report"}, path
        self.before = parts["before"]
        self.after = parts.get("after", self.before)
        self.report = parts.get("report", "").splitlines()

    def check(self, newline: str = "\n") -> None:
        """Rewrite the script with the given line ends, and compare the text and the report with the expected ones."""
        done = rewrite(self.before.replace("\n", newline))
        assert done.text == self.after.replace("\n", newline)
        assert [f"{one.line}: {one.rule}: {one.level.value}: {one.text}" for one in done.findings] == self.report


def cases_of(test_file: str) -> list[object]:
    """Return the cases in the folder that is named after a test's module, as parameters for pytest."""
    path = Path(test_file)
    folder = path.with_name(path.stem.removeprefix("test_"))
    cases = [RuleCase(path) for path in sorted(folder.glob("*.txt"))]
    assert cases, folder
    return [pytest.param(case, id=case.path.stem) for case in cases]


def all_cases() -> list[RuleCase]:
    """Return the cases of all modules."""
    return [RuleCase(path) for path in sorted(_TESTS.rglob("*.txt"))]
