import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.core import script_lines

pytestmark = [pytest.mark.graph]


def _here() -> str:
    """Return the line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"test_script_lines.py:{frame.f_back.f_lineno}"


def test_line_of_a_call_skips_lines_of_libraries() -> None:
    # Python's `map` and TensorFlow's `map_structure` call the lambda, so lines of libraries are between the two calls.
    assert list(map(lambda _: script_lines.line_of_call(), [0])) == [_here()]  # noqa: C417 - a call through another
    assert tf.nest.map_structure(lambda _: script_lines.line_of_call(), [0]) == [_here()]


@pytest.mark.parametrize("clip", [None, tf.clip_by_global_norm, tfmp.clip_by_global_norm])
def test_clipped_gradients_are_traced_back_to_the_line_that_made_them(clip: Callable[..., Any] | None) -> None:
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0])
        grads, line = tf.gradients(tf.reduce_sum(w * w), [w]), _here()
        if clip is not None:
            grads, _ = clip(grads, 1.0)
        op = script_lines.gradient_op(grads)
        assert op is not None
        assert script_lines.line_of_op(op) == line


def test_line_of_a_sparse_gradient_is_found_beside_none() -> None:
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=[[1.0], [2.0]])
        (grad,), line = tf.gradients(tf.reduce_sum(tf.gather(w, [0])), [w]), _here()
        assert isinstance(grad, tf.IndexedSlices)
        assert script_lines.line_of_gradients([None, grad]) == line


def test_script_that_is_installed_itself_is_named_if_nothing_else_calls(tmp_path: Path) -> None:
    names: dict[str, Any] = {"script_lines": script_lines, "__name__": "own.train"}
    text = "line = script_lines.with_library(script_lines.line_of_call())"
    code = compile(text, str(tmp_path / "site-packages" / "own" / "train.py"), "exec")
    # Above the code that a thread runs, there is only the standard library.
    thread = threading.Thread(target=exec, args=(code, names))
    thread.start()
    thread.join()
    assert names["line"] == "train.py:1"
