from pathlib import Path

import pytest
import tensorflow as tf

from tfmp.core.tracing import ops_are_watched, within_xla, without_autograph

pytestmark = pytest.mark.essential


def _larger(value: tf.Tensor) -> tf.Tensor:
    if value > 0:
        value = value + 1
    return value


def _caller(value: tf.Tensor) -> tf.Tensor:
    return _larger(value)


def test_autograph_converts_neither_the_function_nor_its_callees() -> None:
    assert float(tf.function(_caller)(tf.constant(1.0))) == 2
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(without_autograph(_caller))(tf.constant(1.0))


def test_plain_function_is_not_within_xla() -> None:
    seen = []
    tf.function(lambda: seen.append(within_xla()))()
    assert seen == [False]


def test_function_traced_inside_a_compiled_function_is_within_xla() -> None:
    seen = []

    @tf.function
    def inner() -> tf.Tensor:
        seen.append(within_xla())
        return tf.constant(1.0)

    @tf.function(jit_compile=True)
    def outer(flag: tf.Tensor) -> tf.Tensor:
        return tf.cond(flag, inner, lambda: tf.constant(0.0))

    assert float(outer(tf.constant(True))) == 1
    assert seen == [True]


def test_graph_of_a_session_is_not_within_xla() -> None:
    with tf.Graph().as_default():
        assert not within_xla()


def test_enable_check_numerics_is_noticed_until_it_is_disabled() -> None:
    assert not ops_are_watched()
    tf.debugging.enable_check_numerics()
    try:
        seen = []
        tf.function(lambda: seen.append(ops_are_watched()))()
        assert seen == [True]
    finally:
        tf.debugging.disable_check_numerics()
    assert not ops_are_watched()


def test_enable_dump_debug_info_is_noticed_until_it_is_disabled(tmp_path: Path) -> None:
    tf.debugging.experimental.enable_dump_debug_info(str(tmp_path))
    try:
        assert ops_are_watched()
    finally:
        tf.debugging.experimental.disable_dump_debug_info()
    assert not ops_are_watched()
