"""The places where a module of TensorFlow leaves sight."""

import pytest

from tfmp.migrate.analysis.hidden_modules import Hidden, imported_as_text, passed_on, run_as_text
from tfmp.migrate.analysis.script import Script


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
