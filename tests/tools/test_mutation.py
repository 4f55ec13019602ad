"""The command that tries mutants: which changes it makes, and what it says of those that no test notices."""

import os
from pathlib import Path

import pytest
import python_process

pytest.importorskip("mutmut", reason="needs mutmut, which the tox environment tf221 has")

from tools.mutation.mutants import mutants_of

_ROOT = Path(__file__).parents[2]


def _changes(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "module.py"
    path.write_text(source)
    mutants = mutants_of(path)
    assert all(mutant.code() is not None for mutant in mutants)
    return [f"{mutant.line} {mutant.function}: {mutant.before} -> {mutant.after}" for mutant in mutants]


def test_each_function_is_changed_and_what_is_around_it_is_not(tmp_path: Path) -> None:
    source = """\
LIMIT = 2 + 3

class Counter:
    step = 1

    @property
    def next(self, by=4):
        '''A number.'''
        def later(value: int) -> int:
            return value + 5
        return later
"""
    assert _changes(tmp_path, source) == ["10 Counter.next: value + 5 -> value - 5", "10 Counter.next: 5 -> 6"]


def test_what_a_reader_is_told_and_what_changes_nothing_is_not_changed(tmp_path: Path) -> None:
    source = """\
def check(value, log):
    if value:
        raise ValueError("no " + str(value))
    log.warning("it is %s", value)
    tf.add(value, name="sum")
    add(saved=False)
    return f"{value + 1}"
"""
    assert _changes(tmp_path, source) == [
        '5 check: tf.add(value, name="sum") -> tf.add(None, name="sum")',
        '5 check: tf.add(value, name="sum") -> tf.add(name="sum")',
        "6 check: False -> True",
    ]


_MODULE = """\
class Scale:
    def __init__(self):
        self.value = 8

    @property
    def half(self):
        return self.value / 2

    def doubled(self):
        return self.value * 2

    def unused(self):
        return -self.value
"""
_TESTS = """\
from module import Scale

half = Scale.half.fget  # Held before the mutants are tried.

def test_half():
    assert half(Scale()) == 4

def test_doubled():
    assert Scale().doubled() > 8
"""


def test_the_command_names_the_mutants_that_no_test_notices(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(_MODULE)
    (tmp_path / "test_module.py").write_text(_TESTS)
    command = ["-m", "tools.mutation", "module.py", "test_module.py", "--processes=1"]
    done = python_process.run(*command, directory=tmp_path, PYTHONPATH=f"{_ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-4:] == [
        "survived: module.py:10 Scale.doubled: 2  ->  3",
        "not run:  module.py:13 Scale.unused: -self.value  ->  +self.value",
        "module.py: 5 of 7 mutants killed (0 as they hung), 71.4%",
        "all: 5 of 7 mutants killed (0 as they hung), 71.4%",
    ]
