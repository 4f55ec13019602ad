"""Scripts before and after the rewrite: text files, in a folder for each module of the rules."""

from pathlib import Path

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


def cases(folder: str = "**") -> dict[str, RuleCase]:
    """Return the cases below tests/migrate in the folders of a name, by folder and name; by default all."""
    found = {f"{path.parent.name}/{path.stem}": RuleCase(path) for path in sorted(_TESTS.glob(f"**/{folder}/*.txt"))}
    assert found, folder
    return found
