"""The oracle says what the documentation and the named faults say, and the comparison with it finds what is wrong."""

import pytest
from faults import FAULTS, Fault, course_of
from kit import checks
from kit.installed import hosts
from kit.oracle import Rule, course, scales
from kit.structures import STRUCTURES

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")


@pytest.mark.graph
def test_checks_see_an_overflow_that_is_applied() -> None:
    make, make_plain = hosts()["v1 graph, resource variables"]
    fault = FAULTS["inf"]
    unprotected, plain = (each(STRUCTURES[fault.structure], None) for each in (make, make_plain))
    found = checks.violations(course_of(fault), checks.train(unprotected, fault.steps), plain)
    assert "step 1 must be skipped, and something moved" in found
    assert "after step 4 weights or slots are not those without a wrapper" in found


@pytest.mark.graph
def test_rule_of_the_scale_is_the_documented_one() -> None:
    assert scales([False, False, False, True, True, False], Rule()) == [1024, 1024, 1024, 2048, 1024, 512, 512]
    assert scales([True] * 12, Rule())[-4:] == [2, 1, 1, 1]
    # Finite steps do not reset the count of bad steps.
    assert scales([True, False, True], Rule(1024, 3, 2)) == [1024, 1024, 1024, 512]


@pytest.mark.graph
@pytest.mark.parametrize("fault", [fault for fault in FAULTS.values() if fault.structure == "all forms"])
def test_oracle_skips_the_steps_that_the_table_names(fault: Fault) -> None:
    found = course(STRUCTURES[fault.structure], fault.steps, Rule())
    wanted = course_of(fault)
    assert [each.skipped for each in found.expected] == [each.skipped for each in wanted.expected]
    assert [each.loss_scale for each in found.expected] == [each.loss_scale for each in wanted.expected]
