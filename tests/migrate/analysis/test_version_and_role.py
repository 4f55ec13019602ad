"""What a script is: its version, its role, and where TensorFlow leaves sight."""

import pytest

from tfmp.migrate.analysis.hidden_modules import Hidden, imported_as_text, passed_on, run_as_text
from tfmp.migrate.analysis.project_role import project_role
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import TfVersion, detect_version, is_checked_for, is_guarded, is_run

_V1 = "import tensorflow as tf\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (_V1 + "tf.placeholder(tf.float32)\n", TfVersion.V1),
        (_V1 + "tf.compat.v1.placeholder(tf.float32)\n", TfVersion.COMPAT_V1),
        (_V1 + "tf.GradientTape()\n", TfVersion.V2),
        (_V1 + "tf.GradientTape()\ntf.placeholder(tf.float32)\n", TfVersion.MIXED),
        (_V1 + "tf.nn.dropout(x, 0.5)\n", TfVersion.AMBIGUOUS),
        (_V1 + "tf.math.exp(x)\n", TfVersion.NEUTRAL),
        (_V1 + "tf.reduce_sum(x, keep_dims=True)\n", TfVersion.V1),
    ],
)
def test_the_names_of_a_script_show_its_version(text: str, version: TfVersion) -> None:
    assert detect_version(Script(text)).version is version


@pytest.mark.parametrize(("told", "version"), [(1, TfVersion.V1), (2, TfVersion.NEUTRAL), (None, TfVersion.AMBIGUOUS)])
def test_scripts_around_it_decide_for_a_script_without_evidence(told: int | None, version: TfVersion) -> None:
    assert detect_version(Script(_V1 + "tf.nn.dropout(x, 0.5)\n", told)).version is version


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


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("if __name__ == '__main__':\n    main()\n", True),
        ('if("__main__"==__name__):\n    main()\n', True),
        (_V1 + "sess = tf.Session()\n", True),
        (_V1 + "def f():\n    return tf.Session()\n", False),
        (_V1 + "with tf.train.MonitoredTrainingSession() as s:\n    s.run(op)\n", True),
        (_V1 + "with tf.train.SingularMonitoredSession() as s:\n    s.run(op)\n", True),
        (_V1 + "with tf.train.MonitoredSession() as s:\n    s.run(op)\n", True),
        (_V1 + "supervisor = tf.train.Supervisor()\n", True),
        (_V1 + "with tf.train.SessionManager().prepare_session('') as s:\n    s.run(op)\n", True),
        (_V1 + "for k in range(2):\n    with tf.train.MonitoredTrainingSession() as s:\n        s.run(op)\n", True),
        (_V1 + "from tensorflow.contrib import slim\nslim.learning.train(op, 'logs')\n", True),
        ("from absl import app\napp.run(main)\n", True),
        ("import requests\nsession = requests.Session()\n", False),
    ],
)
def test_a_main_block_or_a_session_shows_that_a_script_is_run(text: str, run: bool) -> None:
    assert is_run(Script(text)) is run


_WORK = (
    _V1
    + """
def train():
    with tf.train.MonitoredTrainingSession() as session:
        session.run(op)

def go():
    train()

class Trainer:
    def __init__(self):
        self.steps = 3

    def work(self):
        go()

class Opened:
    def __init__(self):
        self.session = tf.Session()
"""
)


@pytest.mark.parametrize("call", ["train()", "for _ in range(2):\n    go()", "one = Trainer()\none.work()", "Opened()"])
def test_a_session_in_a_function_that_the_script_calls_shows_that_it_is_run(call: str) -> None:
    assert is_run(Script(f"{_WORK}{call}\n"))


@pytest.mark.parametrize(
    "line", ["", "one = Trainer()", "make = lambda: train()", "import os\nos.work()", "print(train)"]
)
def test_a_library_that_defines_such_functions_is_not_run(line: str) -> None:
    assert not is_run(Script(f"{_WORK}{line}\n"))


_IMPORT = "import tensorflow as tf\n"


def test_a_library_needs_the_behavior_that_a_script_selects() -> None:
    library = project_role(Script(_IMPORT + "def f():\n    return tf.placeholder(tf.float32)\n"))
    assert (library.needs_behavior, library.settles_behavior, library.line) == (True, False, 1)
    script = project_role(Script(_IMPORT + "tf.disable_v2_behavior()\ntf.placeholder(tf.float32)\n"))
    assert (script.needs_behavior, script.settles_behavior) == (True, True)


def _shown(found: list[Hidden]) -> list[str]:
    return [each.shown for each in found]


@pytest.mark.parametrize("use", ["f(tf)", "x.tf = tf", "x = [tf]", "x = tf or y", "f = lambda: tf", "a, b = tf, 1"])
def test_a_module_that_is_a_value_is_passed_on(use: str) -> None:
    assert _shown([*passed_on(Script(f"import tensorflow as tf\n{use}\n"))]) == ["tf"]


@pytest.mark.parametrize("use", ["x = tf", "x = y = tf", "x = tf.compat.v1 if a else tf", "if tf: pass", "print(tf)"])
def test_a_module_that_is_followed_or_looked_at_is_not(use: str) -> None:
    assert _shown([*passed_on(Script(f"import tensorflow as tf\n{use}\n"))]) == []


def test_modules_of_which_names_are_left_are_less_likely() -> None:
    script = Script("import tensorflow as tf\nf(tf.train)\nf(tf.nn)\nf(tf.keras)\nf(tf.float32)\n")
    assert [(each.shown, each.is_likely) for each in passed_on(script)] == [("tf.train", True), ("tf.nn", False)]


def test_after_the_rewrite_of_the_import_only_contrib_may_be_behind_a_module() -> None:
    script = Script("import tensorflow.compat.v1 as tf\ntf.placeholder(x)\nf(tf.train)\nf(tf)\n")
    assert _shown([*passed_on(script)]) == ["tf"]


def test_names_of_compat_v1_are_followed_behind_an_import_by_text() -> None:
    text = "import importlib\nT = importlib.import_module({!r})\n"
    assert _shown([*imported_as_text(Script(text.format("tensorflow.compat.v1")))]) == []
    assert len([*imported_as_text(Script(text.format("tensorflow")))]) == 1


def test_code_as_text_is_found_by_the_words_of_the_script() -> None:
    script = Script("import tensorflow as T\nU = T\neval('U.train')\neval('np.train')\nexec('T.' + name)\n")
    assert _shown([*run_as_text(script)]) == ["eval('U.train')", "exec('T.' + name)"]
