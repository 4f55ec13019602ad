"""R17: names that Python, NumPy and SciPy have removed."""

import pytest

from tests.migrate.rules.rule_cases import RuleCase, cases_of


@pytest.mark.parametrize("case", cases_of(__file__))
def test_a_script_becomes_what_the_case_says(case: RuleCase) -> None:
    case.check()
