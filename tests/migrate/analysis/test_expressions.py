"""Names, calls and literals of expressions."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.expressions import argument, imported_by, one_tensorflow
from tfmp.migrate.analysis.script import Script


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import tensorflow.compat.v1 as tf", [("tensorflow", "tensorflow.compat.v1", "tf")]),
        ("import os.path, sys", [("os.path", "os.path", "os"), ("sys", "sys", "sys")]),
        ("from tensorflow import keras as k", [("tensorflow.keras", "tensorflow.keras", "k")]),
        ("from tensorflow import *", [("tensorflow", "tensorflow", "")]),
        ("from . import layers", []),
    ],
)
def test_imports_are_read_with_the_names_that_they_bind(text: str, names: list[tuple[str, str, str]]) -> None:
    node = cst.ensure_type(cst.parse_module(text).body[0], cst.SimpleStatementLine).body[0]
    assert isinstance(node, cst.Import | cst.ImportFrom)
    assert [(one.name, one.raw, one.bound) for one in imported_by(node)] == names


def test_only_whole_words_are_tensorflow() -> None:
    assert one_tensorflow("tensorflow_core.compat.v1.nn") == one_tensorflow("tensorflow_core.nn") == "tensorflow.nn"
    assert one_tensorflow("tensorflow_corex.nn") == "tensorflow_corex.nn"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("f(a, b)", "b"), ("f(a, x=b)", "b"), ("f(a)", None), ("f(*a, b)", None), ("f(a, *b)", None), ("f(a, **b)", None)],
)
def test_an_argument_is_found_by_position_or_by_name(text: str, expected: str | None) -> None:
    found = argument(cst.ensure_type(cst.parse_expression(text), cst.Call), 1, "x")
    assert (None if found is None else cst.ensure_type(found, cst.Name).value) == expected


def test_functions_of_modules_are_no_methods() -> None:
    script = Script("import module\nopt.minimize(a)\nmodule.minimize(b)\nmake().minimize(c)\n")
    assert [script.line(call) for call, _ in script.methods("minimize")] == [2, 4]
