"""The state's variables: where they live, what they are called, what a checkpoint holds of them."""

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.storage.state_variables import StateVariables

pytestmark = [pytest.mark.essential, pytest.mark.graph]


def _manager() -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 10, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def _initialize(session: tf.compat.v1.Session) -> None:
    session.run(tf.compat.v1.global_variables_initializer())


def test_manager_made_under_control_dependencies_is_initialized_without_them(session: tf.compat.v1.Session) -> None:
    needs_feed = tf.compat.v1.placeholder(tf.float32, []) + 1
    with tf.control_dependencies([needs_feed]):
        _manager()
    _initialize(session)
    assert session.run("loss_scale:0") == 1024


def test_manager_made_inside_a_conditional_outlives_it(session: tf.compat.v1.Session) -> None:
    made = []

    def branch() -> tf.Tensor:
        made.append(_manager())
        return made[0].get_loss_scale()

    scale = tf.cond(tf.compat.v1.placeholder_with_default(True, []), branch, lambda: tf.constant(0.0))
    outside = made[0].get_loss_scale()
    _initialize(session)
    assert session.run([scale, outside]) == [1024, 1024]


def test_scale_that_a_step_has_read_stays_when_the_next_is_stored(session: tf.compat.v1.Session) -> None:
    manager = _manager()
    before = manager.get_loss_scale()
    # The check of a step needs the scale, and so reads it before the scale is adjusted.
    with tf.control_dependencies([before]):
        adjusted = manager.update_loss_scale(tf.constant(False))
    # What overflowed may be counted after that.
    with tf.control_dependencies([adjusted]):
        later = tf.identity(before)
    _initialize(session)
    assert session.run(later) == 1024
    assert session.run(before) == 512


def test_checkpoint_in_a_graph_holds_the_state_under_the_keys_of_eager_code(
    session: tf.compat.v1.Session, tmp_path: Path
) -> None:
    manager = _manager()
    step = manager.update_loss_scale(tf.constant(False))
    checkpoint = tf.train.Checkpoint(manager=manager)
    with session.as_default():
        # Estimator saves such a checkpoint before it has initialized anything.
        before = checkpoint.write(str(tmp_path / "before"))
        _initialize(session)
        session.run(step)
        after = checkpoint.write(str(tmp_path / "after"))
        restored = []
        for path in (before, after):
            checkpoint.read(path).assert_consumed().run_restore_ops()
            restored.append(session.run(manager.get_loss_scale()))
    assert restored == [1024, 512]
    keys = {name for name, _ in tf.train.list_variables(after)} - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    names = ("bad_steps", "good_steps", "loss_scale")
    assert keys == {f"manager/state/values/{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in names}


def test_default_saver_keeps_the_state_and_nothing_else(session: tf.compat.v1.Session, tmp_path: Path) -> None:
    manager = _manager()
    step = [manager.update_loss_scale(tf.constant(False)), manager.note_step(tf.constant(False))]
    with tf.compat.v1.variable_scope("other"):
        other = _manager()
    saver = tf.compat.v1.train.Saver()
    _initialize(session)
    session.run(step)
    path = saver.save(session, str(tmp_path / "model.ckpt"))
    assert tf.train.list_variables(path) == [
        (name, [])
        for name in ("bad_steps", "good_steps", "loss_scale", "other/bad_steps", "other/good_steps", "other/loss_scale")
    ]
    assert tf.train.load_variable(path, "loss_scale") == 512
    session.run(step)
    saver.restore(session, path)
    assert session.run([manager.get_loss_scale(), other.get_loss_scale()]) == [512, 1024]


def test_counts_start_anew_in_each_session(session: tf.compat.v1.Session) -> None:
    manager = _manager()
    count = manager.note_step(tf.constant(True))
    applied = manager.get_status().applied_steps
    session.run([count])
    assert session.run(applied) == 1
    with tf.compat.v1.Session() as other:
        assert other.run(applied) == 0


def test_state_of_two_graphs_is_apart() -> None:
    manager = _manager()
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            update = manager.update_loss_scale(tf.constant(False))
            _initialize(session)
            session.run(update)
            assert session.run(manager.get_loss_scale()) == 512
            assert session.run("loss_scale:0") == 512


def test_manager_does_not_keep_old_graphs_alive() -> None:
    manager = _manager()
    graph = tf.Graph()
    with graph.as_default():
        manager.get_loss_scale()
    seen = weakref.ref(graph)
    del graph
    gc.collect()
    assert seen() is None


def _reads(manager: tfmp.LossScaleManager) -> list[tf.Tensor]:
    return list(manager.get_status())


@pytest.mark.parametrize("make_manager", [lambda: tfmp.FixedLossScaleManager(1024), _manager], ids=["fixed", "exp"])
def test_asking_again_does_not_grow_the_graph(
    session: tf.compat.v1.Session, make_manager: Callable[[], tfmp.LossScaleManager]
) -> None:
    manager = make_manager()
    first = _reads(manager)
    session.graph.finalize()
    assert all(again is before for again, before in zip(_reads(manager), first, strict=True))


def test_value_after_a_step_is_read_after_it(session: tf.compat.v1.Session) -> None:
    manager = _manager()
    finite = tf.constant(False)
    with tf.control_dependencies([manager.update_loss_scale(finite), manager.note_step(finite)]):
        after = _reads(manager)
    _initialize(session)
    for steps in (1, 2, 3):
        assert session.run(after) == [1024 / 2**steps, False, False, steps, 0, steps, steps]


def test_saved_graph_is_loaded_restored_trained_and_saved(
    session: tf.compat.v1.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    w = tf.compat.v1.get_variable("w", initializer=1.0)
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), _manager())
    train_op = opt.minimize(w * math.inf)
    assert tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP)[-1] is train_op
    _initialize(session)
    path = str(tmp_path / "model.ckpt")
    with caplog.at_level("WARNING", logger="tensorflow"):
        tf.compat.v1.train.Saver().save(session, path)
    assert caplog.records == []

    with tf.Graph().as_default(), tf.compat.v1.Session() as loaded:
        saver = tf.compat.v1.train.import_meta_graph(path + ".meta")
        saver.restore(loaded, path)
        loaded.run(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP)[-1])
        assert loaded.run("loss_scale:0") == 512
        saver.save(loaded, path)
    assert tf.train.load_variable(path, "loss_scale") == 512


@pytest.mark.parametrize("saved", [True, False])
def test_one_field_is_read_without_the_others(saved: bool, session: tf.compat.v1.Session) -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    state: StateVariables = StateVariables(Pair(np.int64(1), np.int64(2)), saved=saved)
    assert state.get("second") is state.read().second
    stored = state.assign(Pair(tf.constant(3, tf.int64), tf.constant(4, tf.int64)))
    with tf.control_dependencies([stored]):
        after = state.get("second")
    _initialize(session)
    assert session.run(after) == 4
