"""Fails on a TensorFlow that has one of the private names no longer, or that means something else by it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from tfmp.core.tensorflow_internals import (
    GENERATED_FILE,
    TRACKING_PREFIX,
    control_dependencies,
    control_flow_context,
    converted_as_here,
    global_random_generator,
    gradients_may_be_recorded,
    is_branch,
    is_stateful,
    is_unfinished_branch,
    is_watched,
    key_of_distributed,
    make_slots,
    new_function_graph,
    number_of_tensor,
    op_definition,
    ops_are_watched,
    set_key_of_distributed,
    set_slice_information,
    slice_information,
    unoptimized,
    unrecorded,
    variables_used_by,
    within_loop_of_tf1,
    within_xla,
)
from tfmp.core.tracing import without_autograph


def test_what_a_compiled_function_traces_is_within_xla_and_nothing_else() -> None:
    seen: list[bool] = []
    tf.function(lambda: seen.append(within_xla()))()

    @tf.function
    def inner() -> tf.Tensor:
        seen.append(within_xla())
        return tf.constant(1.0)

    @tf.function(jit_compile=True)
    def outer(flag: tf.Tensor) -> tf.Tensor:
        return tf.cond(flag, inner, lambda: tf.constant(0.0))

    assert float(outer(tf.constant(True))) == 1
    with tf.Graph().as_default():
        seen.append(within_xla())
    assert seen == [False, True, False]


@pytest.mark.parametrize("dumps", [False, True], ids=["check_numerics", "dump_debug_info"])
def test_what_watches_ops_is_noticed_until_it_is_disabled(dumps: bool, tmp_path: Path) -> None:
    debugging, seen = tf.debugging, [ops_are_watched()]
    if dumps:
        debugging.experimental.enable_dump_debug_info(str(tmp_path))
    else:
        debugging.enable_check_numerics()
    try:
        seen.append(ops_are_watched())
        if not dumps:
            tf.function(lambda: seen.append(ops_are_watched()))()
    finally:
        (debugging.experimental.disable_dump_debug_info if dumps else debugging.disable_check_numerics)()
    assert [*seen, ops_are_watched()] == [False, *[True] * (1 if dumps else 2), False]


def _negative_if_asked(value: tf.Tensor) -> tf.Tensor:
    if value > 0:
        value = -value
    return value


def test_function_is_converted_where_autograph_converts_the_code_outside() -> None:
    converted = []
    tf.function(lambda: converted.append(converted_as_here(_negative_if_asked)))()
    as_graph = tf.function(converted[0], autograph=False)
    assert float(as_graph(tf.constant(2.0))) == -2

    not_converted = []
    tf.function(without_autograph(lambda: not_converted.append(converted_as_here(_negative_if_asked))))()
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(not_converted[0], autograph=False)(tf.constant(2.0))


def test_autograph_writes_what_it_converts_into_files_of_a_known_name() -> None:
    converted = tf.autograph.to_graph(_negative_if_asked)
    assert GENERATED_FILE in converted.__code__.co_filename


def test_place_of_ops_in_control_flow_of_tf1_is_known(control_flow_v1: None) -> None:
    contexts, loops = [], []

    def body(value: tf.Tensor) -> tf.Tensor:
        contexts.append(control_flow_context(tf.compat.v1.get_default_graph()))
        loops.append(within_loop_of_tf1())
        return value + 1

    with tf.Graph().as_default() as graph:
        assert control_flow_context(graph) is None
        assert not within_loop_of_tf1()
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


def test_control_dependencies_of_a_graph_are_known() -> None:
    with tf.Graph().as_default() as graph:
        op = tf.no_op()
        assert list(control_dependencies(graph)) == []
        with tf.control_dependencies([op]):
            assert list(control_dependencies(graph)) == [op]


def test_tapes_are_noticed_and_can_be_kept_from_recording() -> None:
    x = tf.constant(2.0)
    assert not gradients_may_be_recorded()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        assert gradients_may_be_recorded()
        assert is_watched(x * x)
        with unrecorded():
            assert not gradients_may_be_recorded()
            unseen = x * x
        seen = x * x
    assert tape.gradient(unseen, x) is None
    assert float(tape.gradient(seen, x)) == 4


def test_functions_run_unoptimized_only_within_the_context() -> None:
    def scaled(x: tf.Tensor) -> tf.Tensor:
        return x * 0.1 * 3.0 * 0.7

    x = tf.range(100.0)
    exact = scaled(x).numpy().tolist()
    with unoptimized():
        assert tf.function(scaled)(x).numpy().tolist() == exact
    assert tf.function(scaled)(x).numpy().tolist() != exact


def test_generator_of_the_global_seed_goes_on_with_each_random_number() -> None:
    tf.random.set_seed(3)
    generator = global_random_generator()
    assert generator is not None
    state = generator.getstate()
    tf.random.uniform([])
    assert generator.getstate() != state


def test_variables_are_known_while_a_function_is_traced() -> None:
    variable, seen = tf.Variable(1.0, trainable=False), []

    @tf.function
    def function() -> tf.Tensor:
        value = variable + 1
        seen.extend(variables_used_by(tf.compat.v1.get_default_graph()))
        return value

    function()
    assert [each is variable for each in seen] == [True]


def test_new_function_graph_captures_what_is_outside() -> None:
    variable = tf.Variable(2.0)
    with new_function_graph("captures").as_default() as graph:
        variable.assign_add(1.0)
    assert [outside is variable.handle for outside, _ in graph.captures] == [True]
    assert float(variable) == 2


def test_ops_are_defined_as_stateful_or_not() -> None:
    assert is_stateful("RandomUniform")
    assert not is_stateful("StatelessRandomUniformV2")
    assert [argument.name for argument in op_definition("MatMul").input_arg] == ["a", "b"]
    assert op_definition("NoSuchOp") is None


def test_keys_in_checkpoints_are_those_that_were_set(
    two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.Variable([1.0], name="plain", use_resource=True)
        assert slice_information(variable) is None
        information = tf.Variable.SaveSliceInfo(full_name="other", full_shape=[1], var_offset=[0], var_shape=[1])
        set_slice_information(variable, information)
        assert slice_information(variable) is information
        assert _saved_names(variable, tmp_path) == ["other"]
    with tf.Graph().as_default(), two_replicas.scope():
        variable = tf.Variable(1.0, name="plain")
        assert key_of_distributed(variable) == "plain"
        set_key_of_distributed(variable, "other")
        assert _saved_names(variable, tmp_path) == ["other"]


def _saved_names(variable: tf.Variable, directory: Path) -> list[str]:
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        path = tf.compat.v1.train.Saver([variable]).save(session, str(directory / "model"))
    return [name for name, _ in tf.train.list_variables(path)]


def test_optimizer_makes_its_slots_before_a_step() -> None:
    variable, optimizer = tf.Variable([1.0, 2.0]), tf.compat.v1.train.MomentumOptimizer(0.5, 0.5)
    make_slots(optimizer, [variable])
    assert optimizer.get_slot(variable, "momentum").shape == [2]


def test_notes_for_checkpoints_are_in_attributes_of_a_known_prefix() -> None:
    module = tf.Module()
    before = set(vars(module))
    tf.train.Checkpoint(module=module)
    module.child = tf.Module()
    added = set(vars(module)) - before - {"child"}
    assert added
    assert all(name.startswith(TRACKING_PREFIX) for name in added)


def test_tensors_are_numbered_in_the_order_in_which_they_are_made() -> None:
    made = [tf.constant(1.0)]

    @tf.function
    def trace(x: tf.Tensor) -> tf.Tensor:
        made.extend((x, x * 2))
        return tf.cond(x > 0, lambda: made.append(x + 1) or made[-1], lambda: x)

    trace(made[0])
    with tf.Graph().as_default():
        made.append(tf.constant(1.0))
    numbers = [number_of_tensor(tensor) for tensor in [*made, tf.constant(1.0)]]
    assert None not in numbers
    assert numbers == sorted(set(numbers))
    assert (number_of_tensor(tf.Variable(1.0)), number_of_tensor(1.0)) == (None, None)


@pytest.mark.parametrize("conditional", ["cond", "switch_case"])
def test_branch_is_unfinished_until_its_conditional_is_built(conditional: str) -> None:
    graphs, found = [], []

    def branch() -> tf.Tensor:
        graphs.append(tf.compat.v1.get_default_graph())
        found.append(list(map(is_unfinished_branch, graphs)))
        return tf.constant(0.0)

    @tf.function
    def trace(index: tf.Tensor) -> None:
        graphs.append(tf.compat.v1.get_default_graph())
        build = {
            "cond": lambda: tf.cond(index > 0, branch, branch),
            "switch_case": lambda: tf.switch_case(index, [branch, branch]),
        }[conditional]
        build()
        found.append(list(map(is_unfinished_branch, graphs)))
        build()
        assert list(map(is_branch, graphs)) == [False, True, True, True, True]

    trace(tf.constant(1))
    assert found == [
        [False, True],
        [False, True, True],
        [False, False, False],
        [False, False, False, True],
        [False, False, False, True, True],
    ]
