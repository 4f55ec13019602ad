"""The TensorFlow version that a script was written for."""

import pytest

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
