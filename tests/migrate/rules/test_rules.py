"""What each rule rewrites and reports, in the scripts of all rules, and what holds for every rule."""

import libcst
import pytest

from tests.migrate.rules.rule_cases import RuleCase, cases
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding
from tfmp.migrate.edits.rewriting import rewrite
from tfmp.migrate.rules import RULES

_CASES = cases()

_each_case = pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)


@_each_case
def test_a_script_becomes_what_the_case_says_with_its_own_line_ends(case: RuleCase) -> None:
    case.check()
    case.check(newline="\r\n")


@_each_case
def test_a_script_that_was_rewritten_is_not_rewritten_again(case: RuleCase) -> None:
    libcst.parse_module(case.after)
    again = rewrite(case.after)
    assert again.text == case.after
    assert again.changes == ()


def test_every_rule_has_cases_in_a_folder_of_its_name() -> None:
    folders = {case.path.parent.name for case in _CASES.values()}
    assert {rule.__module__.rpartition(".")[2] for rule in RULES} - folders == set()


def test_rules_that_edit_are_called_rewrite_and_the_others_report() -> None:
    scripts = [Script(case.before) for case in _CASES.values()]
    editing = {
        rule for rule in RULES if any(not isinstance(result, Finding) for script in scripts for result in rule(script))
    }
    assert {rule: rule.__name__ for rule in RULES} == {
        rule: "rewrite" if rule in editing else "report" for rule in RULES
    }
