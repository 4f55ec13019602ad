"""Scripts before and after the rewrite: text files, in a folder for each module of the rules."""

from pathlib import Path

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


def cases(folder: str = "**") -> dict[str, RuleCase]:
    """Return the cases below tests/migrate in the folders of a name, by folder and name; by default all."""
    found = {f"{path.parent.name}/{path.stem}": RuleCase(path) for path in sorted(_TESTS.glob(f"**/{folder}/*.txt"))}
    assert found, folder
    return found
