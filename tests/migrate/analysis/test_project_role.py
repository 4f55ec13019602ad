"""The role of a script in its project."""

import pytest

from tfmp.migrate.analysis.project_role import is_run, project_role
from tfmp.migrate.analysis.script import Script

_IMPORT = "import tensorflow as tf\n"


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("if __name__ == '__main__':\n    main()\n", True),
        (_IMPORT + "sess = tf.Session()\n", True),
        (_IMPORT + "def f():\n    return tf.Session()\n", False),
    ],
)
def test_a_main_block_or_a_session_shows_that_a_script_is_run(text: str, run: bool) -> None:
    assert is_run(Script(text)) is run


def test_a_library_needs_the_behavior_that_a_script_selects() -> None:
    library = project_role(Script(_IMPORT + "def f():\n    return tf.placeholder(tf.float32)\n"))
    assert (library.needs_behavior, library.settles_behavior, library.line) == (True, False, 1)
    script = project_role(Script(_IMPORT + "tf.disable_v2_behavior()\ntf.placeholder(tf.float32)\n"))
    assert (script.needs_behavior, script.settles_behavior) == (True, True)
