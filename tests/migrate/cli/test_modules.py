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
