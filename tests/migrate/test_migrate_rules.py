"""Each rule, by scripts before and after it, with what is said about them."""

from pathlib import Path

import libcst
import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Options
from tfmp.migrate.edits.rewriting import Rewritten, rewrite
from tfmp.migrate.rules import RULES

_CASES = Path(__file__).parent / "cases"
_PATHS = sorted(_CASES.rglob("*.txt"))


class _Case:
    """A script before, the script after, and the report: a line `line: rule: level: message` for each finding.

    A case that is named `..._to_tfmp` is run with that option. Without an "after" the script stays as it is.
    """

    def __init__(self, path: Path) -> None:
        parts: dict[str, str] = {}
        for part in path.read_text().split("=== ")[1:]:
            name, _, text = part.partition("\n")
            parts[name.strip()] = text
        assert parts.keys() <= {"before", "after", "report"}, path
        self.before = parts["before"]
        self.after = parts.get("after", self.before)
        self.report = parts.get("report", "").splitlines()
        self.options = Options(to_tfmp=path.stem.endswith("_to_tfmp"))


def _report(done: Rewritten) -> list[str]:
    return [f"{found.line}: {found.rule}: {found.level.value}: {found.message}" for found in done.findings]


def _name(path: Path) -> str:
    return str(path.relative_to(_CASES).with_suffix(""))


@pytest.mark.parametrize("path", _PATHS, ids=_name)
def test_a_script_becomes_what_the_case_says(path: Path) -> None:
    case = _Case(path)
    done = rewrite(case.before, case.options)
    assert done.text == case.after
    assert _report(done) == case.report


@pytest.mark.parametrize("path", _PATHS, ids=_name)
def test_a_script_that_was_rewritten_is_not_rewritten_again(path: Path) -> None:
    case = _Case(path)
    libcst.parse_module(case.after)
    again = rewrite(case.after, case.options)
    assert again.text == case.after
    assert again.changes == ()


@pytest.mark.parametrize("path", _PATHS, ids=_name)
def test_line_ends_stay_as_they_are(path: Path) -> None:
    case = _Case(path)
    done = rewrite(case.before.replace("\n", "\r\n"), case.options)
    assert done.text == case.after.replace("\n", "\r\n")
    assert _report(done) == case.report


def test_rules_that_edit_are_called_rewrite_and_the_others_report() -> None:
    cases = [_Case(path) for path in _PATHS]
    scripts = [(Script(case.before), case.options) for case in cases]
    editing = {
        rule
        for rule in RULES
        if any(not isinstance(result, Finding) for script, options in scripts for result in rule(script, options))
    }
    assert {rule: rule.__name__ for rule in RULES} == {
        rule: "rewrite" if rule in editing else "report" for rule in RULES
    }
