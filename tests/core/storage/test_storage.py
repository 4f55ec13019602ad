"""Where state is kept: the names by which scripts fetch it, the keys of checkpoints, and what belongs to a graph."""

import gc
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.storage import graph_variables
from tfmp.core.storage.graph_variables import OncePerGraph
from tfmp.core.storage.state_variables import ByVariables, InCheckpoint

tf1 = tf.compat.v1


def _manager() -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 10, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


@pytest.mark.graph
def test_state_of_each_manager_is_fetched_by_plain_names_behind_the_scopes(session: tf1.Session) -> None:
    update = _manager().update_loss_scale(tf.constant(False))
    _manager()
    for scope in (tf1.variable_scope("one"), tf.name_scope("other")):
        with scope:
            _manager()
    session.run(tf1.global_variables_initializer())
    assert session.run(["loss_scale:0", "good_steps:0", "bad_steps:0"]) == [1024, 0, 0]
    session.run(update)
    names = ["loss_scale:0", "loss_scale_1:0", "one/loss_scale:0", "other/loss_scale:0"]
    assert session.run(names) == [512, 1024, 1024, 1024]


@pytest.mark.graph
def test_custom_getters_do_not_meet_the_state(session: tf1.Session) -> None:
    with tf1.variable_scope(
        "net", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter, reuse=tf1.AUTO_REUSE
    ):
        assert _manager().get_loss_scale().dtype == tf.float32


@pytest.mark.graph
def test_saved_variables_are_as_in_tensorflow_1_and_transient_ones_in_no_collection(session: tf1.Session) -> None:
    transient = graph_variables.add_transient_variable("count", np.int64(3))
    assert session.graph.get_all_collection_keys() == []
    variable = graph_variables.add_saved_variable("scale", np.float32(8))
    resources = tf1.resource_variables_enabled() or tf1.control_flow_v2_enabled()
    assert variable.op.name == ("scale/value" if resources else "scale")
    assert graph_variables.checkpoint_key(variable) == "scale"
    assert tf1.global_variables() == [variable]
    assert tf1.trainable_variables() == []
    session.run(tf1.global_variables_initializer())
    assert session.run("scale:0") == 8
    assert not session.run(transient.is_initialized())
    session.run(transient.initializer)
    assert session.run(transient.read_value()) == 3


@pytest.mark.graph
def test_manager_made_under_control_dependencies_or_in_a_conditional_outlives_them(session: tf1.Session) -> None:
    made = []

    def branch() -> tf.Tensor:
        made.append(_manager())
        return made[-1].get_loss_scale()

    needs_feed = tf1.placeholder(tf.float32, []) + 1
    with tf.control_dependencies([needs_feed]):
        branch()
    scale = tf.cond(tf1.placeholder_with_default(True, []), branch, lambda: tf.constant(0.0))
    outside = [manager.get_loss_scale() for manager in made]
    # Nothing is fed.
    session.run(tf1.global_variables_initializer())
    assert session.run([scale, *outside]) == [1024] * 3


@pytest.mark.graph
def test_scale_that_a_step_has_read_stays_when_the_next_is_stored(session: tf1.Session) -> None:
    manager = _manager()
    before = manager.get_loss_scale()
    # The check of a step needs the scale, and so reads it before the scale is adjusted.
    with tf.control_dependencies([before]):
        adjusted = manager.update_loss_scale(tf.constant(False))
    # What overflowed may be counted after that.
    with tf.control_dependencies([adjusted]):
        later = tf.identity(before)
    session.run(tf1.global_variables_initializer())
    assert session.run(later) == 1024
    assert session.run(before) == 512


@pytest.mark.graph
def test_checkpoint_in_a_graph_has_the_keys_of_eager_code(session: tf1.Session, tmp_path: Path) -> None:
    manager, restored = _manager(), []
    step = manager.update_loss_scale(tf.constant(False))
    checkpoint = tf.train.Checkpoint(manager=manager)
    with session.as_default():
        # Estimator saves such a checkpoint before it has initialized anything.
        before = checkpoint.write(str(tmp_path / "before"))
        session.run(tf1.global_variables_initializer())
        session.run(step)
        after = checkpoint.write(str(tmp_path / "after"))
        for path in (before, after):
            checkpoint.read(path).assert_consumed().run_restore_ops()
            restored.append(session.run(manager.get_loss_scale()))
    assert restored == [1024, 512]
    keys = {name for name, _ in tf.train.list_variables(after)} - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    names = ("bad_steps", "good_steps", "loss_scale")
    assert keys == {f"manager/state/values/{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in names}


@pytest.mark.graph
def test_manager_does_not_keep_old_graphs_alive() -> None:
    manager = _manager()
    graph = tf.Graph()
    with graph.as_default():
        manager.get_loss_scale()
    seen = weakref.ref(graph)
    del graph
    gc.collect()
    assert seen() is None


@pytest.mark.graph
def test_saved_graph_is_loaded_and_trained(
    session: tf1.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    w = tf1.get_variable("w", initializer=1.0)
    opt = tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(), _manager())
    train_op = opt.minimize(w * math.inf)
    assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP)[-1] is train_op
    session.run(tf1.global_variables_initializer())
    path = str(tmp_path / "model.ckpt")
    with caplog.at_level("WARNING", logger="tensorflow"):
        tf1.train.Saver().save(session, path)
    assert caplog.records == []

    with tf.Graph().as_default(), tf1.Session() as loaded:
        saver = tf1.train.import_meta_graph(path + ".meta")
        saver.restore(loaded, path)
        loaded.run(tf1.get_collection(tf1.GraphKeys.TRAIN_OP)[-1])
        assert loaded.run("loss_scale:0") == 512
        saver.save(loaded, path)
    assert tf.train.load_variable(path, "loss_scale") == 512


@pytest.mark.graph
def test_object_is_made_once_for_each_graph_outside_of_conditionals() -> None:
    once, other = OncePerGraph(lambda: tf.constant(42.0)), OncePerGraph(lambda: tf.constant(42.0))
    steps: OncePerGraph[list[str]] = OncePerGraph(list)
    for name in ("one", "other"):
        with tf.Graph().as_default() as graph, tf1.Session() as session:
            assert steps.get() == []
            steps.get().append(name)
            # No key is a string, which would be exported with the graph.
            assert not any(isinstance(key, str) for key in graph.get_all_collection_keys())
            tf.function(lambda: steps.get().append("in a function"))()
            assert steps.get() == [name, "in a function"]
            fed = tf1.placeholder(tf.bool, [])
            value = tf.cond(fed, lambda: once.get() + 1, lambda: tf.constant(0.0))
            with tf.control_dependencies([fed]):
                assert other.get() is other.get() is not once.get()
            # Outside, they need nothing that the conditional needs.
            assert session.run([once.get(), other.get()]) == [42, 42]
            assert session.run(value, {fed: True}) == 43


def test_value_takes_the_place_of_a_variable_in_a_checkpoint_and_back(tmp_path: Path) -> None:
    own, variable = tf.Variable(3.0), tf.Variable(0.0)
    value = InCheckpoint(own.read_value, own.assign)
    path = tf.train.Checkpoint(part=value).write(str(tmp_path / "value"))
    # The variable that the functions use is not saved itself.
    held = [name for name, _ in tf.train.list_variables(path) if name != "_CHECKPOINTABLE_OBJECT_GRAPH"]
    assert held == ["part/.ATTRIBUTES/VARIABLE_VALUE"]
    tf.train.Checkpoint(part=variable).read(path).assert_consumed()
    assert (float(variable), float(own)) == (3, 3)
    variable.assign(5)
    path = tf.train.Checkpoint(part=variable).write(str(tmp_path / "variable"))
    tf.train.Checkpoint(part=value).read(path).assert_consumed()
    assert float(own) == 5


def test_each_list_of_variables_has_an_object_of_its_own_in_a_saved_model_and_in_no_checkpoint() -> None:
    kept = ByVariables(lambda names: tf.Variable(len(names)))
    first, second = kept.of(["kernel", "bias"]), kept.of(["bias", "kernel"])
    assert kept.of(("kernel", "bias")) is first
    assert first is not second
    assert list(kept) == [first, second]
    assert kept._trackable_children() == {}
    assert "_each" in kept._trackable_children("savedmodel")
