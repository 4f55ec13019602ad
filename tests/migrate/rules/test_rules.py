"""What holds for every rule, tried on the scripts of all rules."""

import libcst
import pytest

from tests.migrate.rules.rule_cases import RuleCase, all_cases
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding
from tfmp.migrate.edits.rewriting import rewrite
from tfmp.migrate.rules import RULES

_CASES = all_cases()
_IDS = [f"{case.path.parent.name}/{case.path.stem}" for case in _CASES]


def test_every_case_lies_beside_the_test_of_its_module() -> None:
    folders = {case.path.parent for case in _CASES}
    assert all(folder.with_name(f"test_{folder.name}.py").exists() for folder in folders)


@pytest.mark.parametrize("case", _CASES, ids=_IDS)
def test_a_script_that_was_rewritten_is_not_rewritten_again(case: RuleCase) -> None:
    libcst.parse_module(case.after)
    again = rewrite(case.after)
    assert again.text == case.after
    assert again.changes == ()


@pytest.mark.parametrize("case", _CASES, ids=_IDS)
def test_line_ends_stay_as_they_are(case: RuleCase) -> None:
    case.check(newline="\r\n")


def test_rules_that_edit_are_called_rewrite_and_the_others_report() -> None:
    scripts = [Script(case.before) for case in _CASES]
    editing = {
        rule for rule in RULES if any(not isinstance(result, Finding) for script in scripts for result in rule(script))
    }
    assert {rule: rule.__name__ for rule in RULES} == {
        rule: "rewrite" if rule in editing else "report" for rule in RULES
    }
