"""What the oracle says is documented, as the page of faults is what is printed; and each promise has a test here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_table import table
from faults import FAULTS, LARGE_FAULTS, REPLICA_FAULTS, Fault, course_of, faults_of
from kit.installed import hosts
from kit.oracle import Rule, course, scales
from kit.structures import STRUCTURES
from scenarios import SCENARIOS

pytestmark = [pytest.mark.graph, pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")]

_FOLDER = Path(__file__).parent
_DOCS = _FOLDER.parents[1] / "docs"
_PAGE = _DOCS.joinpath("reference", "faults.md").read_text()
_PROMISES = _DOCS.joinpath("explanation", "step.md").read_text()
#: The rows of the tables of faults, whose first column is "fault"; another table comes before them.
_ROWS = [line for line in _PAGE[_PAGE.index("| fault |") :].splitlines() if line.startswith("| ")]


def _printed(rule: Rule | None) -> list[str]:
    host = "v1 graph, resource variables"
    names = ["inf", "float16: 1e5, which does not fit"]
    return [row for row in table({host: hosts()[host]}, names, faults_of, rule) if row.startswith("| ")]


def test_program_prints_rows_of_the_page_and_names_an_overflow_that_is_applied() -> None:
    assert len(_printed(Rule())) == 3
    assert {*_printed(Rule())} <= {*_ROWS}
    for row in _printed(None)[1:]:
        assert "WRONG: step 1 must be skipped, and something moved" in row
        assert "weights or slots are not those without a wrapper" in row


def test_page_has_a_row_for_every_fault_and_no_other() -> None:
    faults = [row.split(" | ")[0].removeprefix("| ") for row in _ROWS]
    assert list(dict.fromkeys(faults)) == list(dict.fromkeys(["fault", *FAULTS, *LARGE_FAULTS, *REPLICA_FAULTS]))


def test_rule_of_the_scale_is_the_documented_one() -> None:
    assert scales([False, False, False, True, True, False], Rule()) == [1024, 1024, 1024, 2048, 1024, 512, 512]
    assert scales([True] * 12, Rule())[-4:] == [2, 1, 1, 1]
    # Finite steps do not reset the count of bad steps.
    assert scales([True, False, True], Rule(1024, 3, 2)) == [1024, 1024, 1024, 512]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS.values() if fault.structure == "all forms"])
def test_oracle_skips_the_steps_that_the_table_names(fault: Fault) -> None:
    found = course(STRUCTURES[fault.structure], fault.steps, Rule())
    wanted = course_of(fault)
    assert [each.skipped for each in found.expected] == [each.skipped for each in wanted.expected]
    assert [each.loss_scale for each in found.expected] == [each.loss_scale for each in wanted.expected]


def _named() -> Iterator[tuple[str, set[int]]]:
    """Yield the name of each test of the contract, and the numbers of its promises."""
    for path in sorted(_FOLDER.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        for test in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            marks = re.findall(r"mark\.promise\(([\d, ]+)\)", "\n".join(map(ast.unparse, test.decorator_list)))
            numbers = {int(number) for mark in marks for number in mark.split(",")}
            if test.name == "test_host_does_what_the_oracle_says":
                numbers = {number for scenario in SCENARIOS.values() for number in scenario.promises}
            if path != Path(__file__):
                yield f"{path.name}::{test.name}", numbers


def test_promises_of_the_page_are_those_of_the_tests() -> None:
    promised = [int(number) for number in re.findall(r"^\| (\d+) \| ", _PROMISES, re.MULTILINE)]
    assert promised == list(range(1, len(promised) + 1))
    named = dict(_named())
    assert [test for test, numbers in named.items() if not numbers] == []
    assert set().union(*named.values()) == set(promised)
