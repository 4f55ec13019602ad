from pathlib import Path

import tensorflow as tf

from tfmp.core.tracing import ops_are_watched


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
