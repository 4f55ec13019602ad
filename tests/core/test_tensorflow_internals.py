"""Fails on a TensorFlow that has one of the private names no longer, or that means something else by it."""

from collections.abc import Iterator
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
    contexts, loops = [], []

    def body(value: tf.Tensor) -> tf.Tensor:
        contexts.append(internals.control_flow_context(tf.compat.v1.get_default_graph()))
        loops.append(internals.within_loop_of_tf1())
        return value + 1

    with tf.Graph().as_default() as graph:
        op = tf.no_op()
        assert list(internals.control_dependencies(graph)) == []
        with tf.control_dependencies([op]):
            assert list(internals.control_dependencies(graph)) == [op]
        assert internals.control_flow_context(graph) is None
        assert not internals.within_loop_of_tf1()
        tf.cond(tf.constant(True), lambda: body(tf.constant(0)), lambda: tf.constant(0))
        tf.while_loop(lambda value: value < 3, body, [tf.constant(0)])
    assert None not in contexts
    assert loops == [False, True]


@pytest.fixture
def control_flow_v1() -> Iterator[None]:
    was_v2 = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    yield
    if was_v2:
        tf.compat.v1.enable_control_flow_v2()


def test_tapes_are_noticed_and_can_be_kept_from_recording() -> None:
    x = tf.constant(2.0)
    assert not internals.gradients_may_be_recorded()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        assert internals.gradients_may_be_recorded()
        assert internals.is_watched(x * x)
        with internals.unrecorded():
            assert not internals.gradients_may_be_recorded()
            unseen = x * x
        seen = x * x
    assert tape.gradient(unseen, x) is None
    assert float(tape.gradient(seen, x)) == 4


def test_variables_are_known_while_a_function_is_traced_and_a_new_graph_captures_what_is_outside() -> None:
    variable, seen = tf.Variable(2.0, trainable=False), []

    @tf.function
    def function() -> tf.Tensor:
        value = variable + 1
        seen.extend(internals.variables_used_by(tf.compat.v1.get_default_graph()))
        return value

    function()
    assert [each is variable for each in seen] == [True]
    with internals.new_function_graph("captures").as_default() as graph:
        variable.assign_add(1.0)
    assert [outside is variable.handle for outside, _ in graph.captures] == [True]
    assert float(variable) == 2


def test_ops_are_defined_as_stateful_or_not() -> None:
    assert internals.is_stateful("RandomUniform")
    assert not internals.is_stateful("StatelessRandomUniformV2")
    assert [argument.name for argument in internals.op_definition("MatMul").input_arg] == ["a", "b"]
    assert internals.op_definition("NoSuchOp") is None


def test_keys_in_checkpoints_are_those_set(two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path) -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.Variable([1.0], name="plain", use_resource=True)
        assert internals.slice_information(variable) is None
        information = tf.Variable.SaveSliceInfo(full_name="other", full_shape=[1], var_offset=[0], var_shape=[1])
        internals.set_slice_information(variable, information)
        assert internals.slice_information(variable) is information
        assert _saved_names(variable, tmp_path) == ["other"]
    with tf.Graph().as_default(), two_replicas.scope():
        variable = tf.Variable(1.0, name="plain")
        assert internals.key_of_distributed(variable) == "plain"
        internals.set_key_of_distributed(variable, "other")
        assert _saved_names(variable, tmp_path) == ["other"]


def _saved_names(variable: tf.Variable, directory: Path) -> list[str]:
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        path = tf.compat.v1.train.Saver([variable]).save(session, str(directory / "model"))
    return [name for name, _ in tf.train.list_variables(path)]


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
