"""Private names of TensorFlow of which no other test says exactly what they mean."""

from pathlib import Path

import pytest
import tensorflow as tf

from tfmp.core import tensorflow_internals as internals
from tfmp.core.tracing import without_autograph


@pytest.mark.parametrize("dumps", [False, True], ids=["check_numerics", "dump_debug_info"])
def test_what_watches_ops_is_noticed_until_it_is_disabled(dumps: bool, tmp_path: Path) -> None:
    debugging, seen = tf.debugging, [internals.ops_are_watched()]
    if dumps:
        debugging.experimental.enable_dump_debug_info(str(tmp_path))
    else:
        debugging.enable_check_numerics()
    try:
        seen.append(internals.ops_are_watched())
        if not dumps:
            tf.function(lambda: seen.append(internals.ops_are_watched()))()
    finally:
        (debugging.experimental.disable_dump_debug_info if dumps else debugging.disable_check_numerics)()
    assert [*seen, internals.ops_are_watched()] == [False, *[True] * (1 if dumps else 2), False]


def _negative_if_asked(value: tf.Tensor) -> tf.Tensor:
    if value > 0:
        value = -value
    return value


def test_function_is_converted_where_autograph_converts_the_code_outside() -> None:
    converted = []
    tf.function(lambda: converted.append(internals.converted_as_here(_negative_if_asked)))()
    assert float(tf.function(converted[0], autograph=False)(tf.constant(2.0))) == -2
    # It writes what it converts into files of a known name.
    assert internals.GENERATED_FILE in tf.autograph.to_graph(_negative_if_asked).__code__.co_filename

    not_converted = []
    tf.function(without_autograph(lambda: not_converted.append(internals.converted_as_here(_negative_if_asked))))()
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(not_converted[0], autograph=False)(tf.constant(2.0))


def test_place_of_ops_in_control_dependencies_and_control_flow_of_tf1_is_known(control_flow_v1: None) -> None:
    contexts, loops, at_top_level = [], [], []

    def body(value: tf.Tensor) -> tf.Tensor:
        contexts.append(internals.control_flow_context(tf.compat.v1.get_default_graph()))
        loops.append(internals.within_loop_of_tf1())
        at_top_level.append(internals.at_top_level_of_graph())
        return value + 1

    with tf.Graph().as_default() as graph:
        op = tf.no_op()
        assert internals.at_top_level_of_graph()
        with tf.control_dependencies([op]):
            assert not internals.at_top_level_of_graph()
        assert internals.control_flow_context(graph) is None
        assert not internals.within_loop_of_tf1()
        tf.cond(tf.constant(True), lambda: body(tf.constant(0)), lambda: tf.constant(0))
        tf.while_loop(lambda value: value < 3, body, [tf.constant(0)])
    assert None not in contexts
    assert loops == [False, True]
    assert not any(at_top_level)


@pytest.mark.parametrize("conditional", ["cond", "switch_case"])
def test_branch_is_unfinished_until_its_conditional_is_built(conditional: str) -> None:
    graphs, found = [], []

    def note() -> None:
        found.append([place for place, graph in enumerate(graphs) if internals.is_unfinished_branch(graph)])

    def branch() -> tf.Tensor:
        graphs.append(tf.compat.v1.get_default_graph())
        note()
        return tf.constant(0.0)

    @tf.function
    def trace(index: tf.Tensor) -> None:
        graphs.append(tf.compat.v1.get_default_graph())
        for _ in range(2):
            if conditional == "cond":
                tf.cond(index > 0, branch, branch)
            else:
                tf.switch_case(index, [branch, branch])
            note()
        assert list(map(internals.is_branch, graphs)) == [False, True, True, True, True]

    trace(tf.constant(1))
    assert found == [[1], [1, 2], [], [3], [3, 4], []]
