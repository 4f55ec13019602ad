"""The names by which scripts fetch the variables of a graph, and the keys of their values in checkpoints."""

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.storage import graph_variables

pytestmark = [pytest.mark.essential, pytest.mark.graph]


def _manager() -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 10, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def _initialize(session: tf.compat.v1.Session) -> None:
    session.run(tf.compat.v1.global_variables_initializer())


def test_plain_names_are_fetched_as_numbers(session: tf.compat.v1.Session) -> None:
    manager = _manager()
    update = manager.update_loss_scale(tf.constant(False))
    _initialize(session)
    assert session.run(["loss_scale:0", "good_steps:0", "bad_steps:0"]) == [1024, 0, 0]
    session.run(update)
    assert session.run("loss_scale:0") == 512


def test_second_manager_has_a_state_and_a_name_of_its_own(session: tf.compat.v1.Session) -> None:
    update = _manager().update_loss_scale(tf.constant(False))
    _manager()
    _initialize(session)
    session.run(update)
    assert session.run(["loss_scale:0", "loss_scale_1:0"]) == [512, 1024]


@pytest.mark.parametrize("scope", [tf.compat.v1.variable_scope, tf.name_scope])
def test_scopes_come_before_the_name(session: tf.compat.v1.Session, scope: type) -> None:
    with scope("outer"):
        _manager()
    _initialize(session)
    assert session.run("outer/loss_scale:0") == 1024


def test_custom_getters_do_not_meet_the_state(session: tf.compat.v1.Session) -> None:
    with tf.compat.v1.variable_scope(
        "net", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter, reuse=tf.compat.v1.AUTO_REUSE
    ):
        assert _manager().get_loss_scale().dtype == tf.float32


def test_variable_is_a_reference_only_where_tensorflow_1_would_make_one(session: tf.compat.v1.Session) -> None:
    variable = graph_variables.add_saved_variable("scale", np.float32(8))
    resources = tf.compat.v1.resource_variables_enabled() or tf.compat.v1.control_flow_v2_enabled()
    assert variable.op.name == ("scale/value" if resources else "scale")
    assert graph_variables.checkpoint_key(variable) == "scale"
    assert tf.compat.v1.global_variables() == [variable]
    assert tf.compat.v1.trainable_variables() == []
    _initialize(session)
    assert session.run("scale:0") == 8


def test_transient_variable_is_in_no_collection(session: tf.compat.v1.Session) -> None:
    variable = graph_variables.add_transient_variable("count", np.int64(3))
    assert session.graph.get_all_collection_keys() == []
    assert not session.run(variable.is_initialized())
    session.run(variable.initializer)
    assert session.run(variable.read_value()) == 3


def test_parts_of_a_variable_have_the_key_of_the_whole(session: tf.compat.v1.Session) -> None:
    del session
    partitioner = tf.compat.v1.fixed_size_partitioner(2)
    table = tf.compat.v1.get_variable("table", [4], partitioner=partitioner)
    assert [graph_variables.checkpoint_key(part) for part in table] == ["table", "table"]
    assert graph_variables.checkpoint_key(tf.compat.v1.get_variable("bias", [1])) == "bias"


def test_top_level_is_outside_of_functions_control_dependencies_and_conditionals(
    session: tf.compat.v1.Session,
) -> None:
    del session
    found = [graph_variables.at_top_level_of_graph()]

    def ask() -> tf.Tensor:
        found.append(graph_variables.at_top_level_of_graph())
        return tf.constant(1.0)

    with tf.control_dependencies([tf.constant(1.0)]):
        ask()
    tf.cond(tf.compat.v1.placeholder(tf.bool, []), ask, ask)
    tf.function(ask)()
    assert found == [True, False, False, False, False]
    ask()
    assert found[-1]
