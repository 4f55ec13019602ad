"""The role of a script in its project."""

from tfmp.migrate.analysis.project_role import project_role
from tfmp.migrate.analysis.script import Script

_IMPORT = "import tensorflow as tf\n"


def test_a_library_needs_the_behavior_that_a_script_selects() -> None:
    library = project_role(Script(_IMPORT + "def f():\n    return tf.placeholder(tf.float32)\n"))
    assert (library.needs_behavior, library.settles_behavior, library.line) == (True, False, 1)
    script = project_role(Script(_IMPORT + "tf.disable_v2_behavior()\ntf.placeholder(tf.float32)\n"))
    assert (script.needs_behavior, script.settles_behavior) == (True, True)
