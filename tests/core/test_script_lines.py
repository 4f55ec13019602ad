"""Messages are seen, and name the line of the user's script."""

import inspect
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.core import messages


@pytest.mark.parametrize("setup", ["", "logging.warning('set up'); "], ids=["nothing", "root-at-warning"])
def test_program_that_set_no_level_sees_the_reports(setup: str) -> None:
    code = f"import logging; {setup}from tfmp.core.messages import visible_logger; visible_logger().info('a report')"
    root = Path(tfmp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "a report\n" in done.stderr


def _here() -> str:
    """Return the line of the caller."""
    return f"{Path(__file__).name}:{inspect.stack()[1].lineno}"


@pytest.mark.graph
def test_line_of_a_call_skips_lines_of_libraries() -> None:
    # Python's `map` and TensorFlow's `map_structure` call the lambda, so lines of libraries are between the two calls.
    assert list(map(lambda _: messages.script_line(), [0])) == [_here()]  # noqa: C417 - a call through another
    assert tf.nest.map_structure(lambda _: messages.script_line(), [0]) == [_here()]


@pytest.mark.graph
def test_line_of_sparse_gradients_is_the_one_that_made_them() -> None:
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=[[1.0], [2.0]])
        grads, line = tf.gradients(tf.reduce_sum(tf.gather(w, [0])), [w]), _here()
        assert isinstance(grads[0], tf.IndexedSlices)
        assert messages.script_line([None, *grads]) == line


@pytest.mark.graph
def test_script_that_is_installed_itself_is_named_if_nothing_else_calls(tmp_path: Path) -> None:
    names: dict[str, Any] = {"messages": messages, "__name__": "own.train"}
    text = "line = messages.with_library(messages.script_line())"
    code = compile(text, str(tmp_path / "site-packages" / "own" / "train.py"), "exec")
    # Above the code that a thread runs, there is only the standard library.
    thread = threading.Thread(target=exec, args=(code, names))
    thread.start()
    thread.join()
    assert names["line"] == "train.py:1"
