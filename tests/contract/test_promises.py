"""Each promise of docs/explanation/step.md has a test here, and each test here is about promises."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scenarios import SCENARIOS

_FOLDER = Path(__file__).parent
_PAGE = _FOLDER.parents[1] / "docs" / "explanation" / "step.md"
#: Tests of the oracle, the table and this list.
_OTHERS = {"test_oracle.py", "test_fault_table.py", "test_promises.py"}


def _named() -> Iterator[tuple[str, set[int]]]:
    """Yield the name of each test of the contract, and the numbers of its promises."""
    for path in sorted(_FOLDER.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        for test in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            marks = re.findall(r"mark\.promise\(([\d, ]+)\)", "\n".join(map(ast.unparse, test.decorator_list)))
            numbers = {int(number) for mark in marks for number in mark.split(",")}
            if test.name == "test_host_does_what_the_oracle_says":
                numbers = {number for scenario in SCENARIOS.values() for number in scenario.promises}
            if path.name not in _OTHERS:
                yield f"{path.name}::{test.name}", numbers


def test_promises_of_the_page_are_those_of_the_tests() -> None:
    promised = [int(number) for number in re.findall(r"^\| (\d+) \| ", _PAGE.read_text(), re.MULTILINE)]
    assert promised == list(range(1, len(promised) + 1))
    named = dict(_named())
    assert [test for test, numbers in named.items() if not numbers] == []
    assert set().union(*named.values()) == set(promised)
