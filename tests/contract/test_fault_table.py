"""The tables of the page docs/reference/faults.md are those that the program prints."""

from collections.abc import Callable
from pathlib import Path

import fault_table
import pytest
from faults import FAULTS, LARGE_FAULTS, REPLICA_FAULTS, faults_of
from kit.hosts import Host
from kit.installed import Make, hosts
from kit.oracle import Rule
from kit.structures import STRUCTURES

_PAGE = Path(__file__).parents[2].joinpath("docs", "reference", "faults.md").read_text()
#: The rows of the tables of faults, whose first column is "fault"; another table comes before them.
_ROWS = [line for line in _PAGE[_PAGE.index("| fault |") :].splitlines() if line.startswith("| ")]
_HOST = "v1 graph, resource variables"


def _makers(rule: Rule | None) -> fault_table.Makers:
    make, make_plain = hosts()[_HOST]

    def maker(make: Make, rule: Rule | None) -> Callable[[str], Host]:
        return lambda structure: make(STRUCTURES[structure], rule)

    return maker(make, rule), maker(make_plain, None)


def _lines(rule: Rule | None) -> list[str]:
    names = ["inf", "float16: 1e5, which does not fit"]
    return list(fault_table.table({_HOST: _makers(rule)}, names, faults_of))


@pytest.mark.graph
def test_program_prints_rows_of_the_page() -> None:
    header, _, *rows = _lines(Rule())
    assert len(rows) == 2
    assert {header, *rows} <= set(_ROWS)


@pytest.mark.graph
def test_program_names_violations() -> None:
    *_, inf, half = _lines(None)
    assert "WRONG: step 1 must be skipped, and something moved" in inf
    assert "WRONG: step 1 must be skipped, and something moved" in half


def test_page_has_a_row_for_every_fault_and_no_other() -> None:
    faults = [row.split(" | ")[0].removeprefix("| ") for row in _ROWS]
    assert list(dict.fromkeys(faults)) == list(dict.fromkeys(["fault", *FAULTS, *LARGE_FAULTS, *REPLICA_FAULTS]))
