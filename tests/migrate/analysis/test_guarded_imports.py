"""Imports and names whose absence the script handles."""

import pytest

from tfmp.migrate.analysis.guarded_imports import is_checked_for, is_guarded
from tfmp.migrate.analysis.script import Script


@pytest.mark.parametrize(
    ("handler", "guarded"),
    [
        ("except ImportError", True),
        ("except (KeyError, ModuleNotFoundError)", True),
        ("except", True),
        ("except KeyError", False),
    ],
)
def test_an_import_is_guarded_by_a_handler_of_its_error(handler: str, guarded: bool) -> None:
    script = Script(f"try:\n    import a\n{handler}:\n    pass\n")
    assert is_guarded(script, script.imports[0].node) is guarded


@pytest.mark.parametrize(
    ("condition", "checked"),
    [('hasattr(tf, "pack")', True), ('tf.__version__ < "1"', True), ("FLAGS.version_2_with_negative", False)],
)
def test_a_name_is_checked_for_by_name_or_version(condition: str, checked: bool) -> None:
    script = Script(f"import tensorflow as tf\nif {condition}:\n    tf.pack(x)\n")
    assert is_checked_for(script, script.uses[-1].node) is checked
