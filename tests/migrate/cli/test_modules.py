"""What a file imports, and whether it is run."""

import ast

import pytest

from tfmp.migrate.cli import modules


def test_imports_inside_functions_are_read_too() -> None:
    module = modules.read(ast.parse("import a.b\ndef f():\n    from ..c import d\n"))
    assert [(one.level, one.names, one.line) for one in module.imports] == [(0, ("a.b",), 1), (2, ("c.d", "c"), 3)]


@pytest.mark.parametrize(
    ("text", "has_main", "calls"),
    [
        ("if '__main__' == __name__:\n    pass\n", True, False),
        ("def f(): pass\nf()\n", False, True),
        ("import registry\nregistry.register(f)\n", False, False),
        ("import tensorflow as tf\ntf.app.run()\n", False, True),
        ("print(1)\n", False, False),
    ],
)
def test_a_main_block_or_a_call_shows_that_a_file_is_run(text: str, has_main: bool, calls: bool) -> None:
    module = modules.read(ast.parse(text))
    assert (module.has_main, module.calls) == (has_main, calls)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import tensorflow as T\nB = T\n", {"T", "B"}),
        ("import tensorflow\ntf = tensorflow\nlib = tf\n", {"lib"}),
        ("import tensorflow as tf\n", set()),
        ("import tensorflow.compat.v1 as T\n", set()),
        ("import numpy as T\nB = T\n", set()),
    ],
)
def test_words_that_are_tensorflow_are_read_for_other_files(text: str, words: set[str]) -> None:
    assert modules.read(ast.parse(text)).tensorflow == words


def test_the_words_of_a_file_are_kept_if_a_star_may_bind_them() -> None:
    assert modules.read(ast.parse("from base import *\nx = T.y\n")).starred == {"x", "T"}
    assert modules.read(ast.parse("from base import T\nx = T.y\n")).starred == set()
