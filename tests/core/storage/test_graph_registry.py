"""What belongs to a graph is kept in that graph."""

import pytest
import tensorflow as tf

from tfmp.core.storage.graph_registry import GraphList, OncePerGraph

pytestmark = [pytest.mark.essential, pytest.mark.graph]


def test_object_is_made_once_for_each_graph() -> None:
    made: list[tf.Graph] = []

    def make() -> tf.Tensor:
        made.append(tf.compat.v1.get_default_graph())
        return tf.constant(42.0)

    once, graphs = OncePerGraph(make), [tf.Graph(), tf.Graph()]
    for graph in graphs * 2:
        with graph.as_default():
            assert once.get() is once.get()
            assert once.get().graph is graph
    assert made == graphs


def test_two_registries_share_no_object(session: tf.compat.v1.Session) -> None:
    del session
    one, other = OncePerGraph(lambda: tf.constant(1.0)), OncePerGraph(lambda: tf.constant(2.0))
    assert one.get() is not other.get()


def test_object_made_in_a_conditional_stands_outside_of_it(session: tf.compat.v1.Session) -> None:
    once = OncePerGraph(lambda: tf.constant(42.0))
    fed = tf.compat.v1.placeholder(tf.bool, [])

    def read() -> tf.Tensor:
        with tf.control_dependencies([fed]):
            return once.get() + 1

    value = tf.cond(fed, read, lambda: tf.constant(0.0))
    # Outside, it needs nothing that the conditional needs.
    assert list(once.get().op.control_inputs) == []
    assert session.run(once.get()) == 42
    assert session.run(value, {fed: True}) == 43


def test_read_is_the_kept_object_where_nothing_orders_it_and_a_new_one_elsewhere(
    session: tf.compat.v1.Session,
) -> None:
    del session
    once = OncePerGraph(lambda: tf.constant(42.0))
    kept = once.get()
    assert once.read() is once.read() is kept
    with tf.control_dependencies([tf.constant(1.0)]):
        assert once.read() is not kept


def test_list_holds_what_was_built_in_its_graph_in_order() -> None:
    steps, losses = GraphList("steps of a test"), GraphList("losses of a test")
    for name in ("one", "other"):
        with tf.Graph().as_default():
            assert steps.items() == []
            steps.append(name)
            steps.append("last")
            losses.append("a loss")
            assert steps.items() == [name, "last"]
            assert losses.items() == ["a loss"]


def test_what_a_function_of_the_graph_adds_is_in_the_graphs_list(session: tf.compat.v1.Session) -> None:
    del session
    steps = GraphList("steps of a test")

    @tf.function
    def step() -> tf.Tensor:
        steps.append("in a function")
        return tf.constant(1.0)

    step()
    assert steps.items() == ["in a function"]


def test_no_key_is_a_string_which_would_be_exported_with_the_graph(session: tf.compat.v1.Session) -> None:
    OncePerGraph(lambda: tf.constant(42.0)).get()
    GraphList("steps of a test").append("a step")
    assert [key for key in session.graph.get_all_collection_keys() if isinstance(key, str)] == []
