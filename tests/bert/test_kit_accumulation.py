"""Windows of micro-batches."""

from pathlib import Path
from typing import Any

import kit_models
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1

_RUNS = 4


def _windowed(**settings: Any) -> kit_models.Model:
    return kit_models.Model(num_accumulation_steps=_RUNS, **settings)


def _large_batches(grads: list[list[np.ndarray]], **settings: Any) -> dict[str, Any]:
    """Return the state after training on the mean of each window."""
    with tf.Graph().as_default(), tf1.Session() as session:
        model = kit_models.Model(**settings)
        session.run(tf1.global_variables_initializer())
        for start in range(0, len(grads), _RUNS):
            model.run(session, [np.mean(each, axis=0) for each in zip(*grads[start : start + _RUNS], strict=True)])
        return kit_models.state(session)


def test_a_window_equals_the_large_batch(session: tf1.Session) -> None:
    settings = {"optimizer_type": "lamb", "manual_fp16": True, "init_loss_scale": 2.0**10, "clip_norm": 1e6}
    model = _windowed(**settings)
    session.run(tf1.global_variables_initializer())
    grads = kit_models.random_grads(3 * _RUNS)
    fetched = [model.run(session, each, "update_step:0", "step_update:0") for each in grads]
    assert fetched == [[run % _RUNS == 0, run // _RUNS] for run in range(1, 3 * _RUNS + 1)]
    state = kit_models.state(session)
    for name, value in _large_batches(grads, **settings).items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_each_micro_batch_is_clipped_by_itself(session: tf1.Session) -> None:
    model = _windowed(clip_norm=2.0)
    session.run(tf1.global_variables_initializer())
    grads = [np.zeros_like(value) for value in kit_models.START.values()]
    # After the division by the 4 runs, the gradients have the norms 4, 16 and 4.
    for size in (16.0, 64.0, 4.0):
        grads[1] = np.float32([size, 0.0])
        model.run(session, grads)
    assert kit_models.state(session)["bert/bias/accum"].tolist() == [2.0 + 2.0 + 1.0, 0.0]


def test_an_overflow_in_one_micro_batch_skips_its_window_alone(session: tf1.Session) -> None:
    model = _windowed(manual_fp16=True, init_loss_scale=2.0**10)
    initialize = tf1.global_variables_initializer()
    outcomes = [model.training.optimizer.applied_steps, model.training.optimizer.skipped_steps]
    grads = kit_models.random_grads(3 * _RUNS)
    for at in range(_RUNS):
        session.run(initialize)
        before_any = session.run(outcomes)
        for each in grads[:_RUNS]:
            model.run(session, each, "step_update:0")
        before = kit_models.state(session)
        overflowing = [
            kit_models.overflowing(each) if run == at else each for run, each in enumerate(grads[_RUNS:-_RUNS])
        ]
        assert [model.run(session, each, "step_update:0") for each in overflowing] == [[1]] * _RUNS
        after = kit_models.state(session)
        assert not after["batch_finite"]
        counted = {"batch_finite", *(name for name in after if "accum" in name or "_steps" in name)}
        for name in set(before) - counted:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
        assert np.subtract(session.run(outcomes), before_any).tolist() == [1, 1]
        for each in grads[2 * _RUNS :]:
            model.run(session, each, "step_update:0")
        state = kit_models.state(session)
        assert (state["batch_finite"], state["global_step"]) == (True, 2)
        assert np.isfinite(state["bert/bias/accum"]).all()


def test_finite_gradients_whose_squares_overflow_leave_a_window_finite(session: tf1.Session) -> None:
    model = _windowed()
    session.run(tf1.global_variables_initializer())
    model.run(session, [np.full_like(value, 1e30) for value in kit_models.START.values()])
    assert kit_models.state(session)["batch_finite"]
    model.run(session, kit_models.overflowing(kit_models.random_grads(1)[0]))
    assert not kit_models.state(session)["batch_finite"]


def test_a_window_goes_on_after_a_restart(session: tf1.Session, tmp_path: Path) -> None:
    model = _windowed(manual_fp16=True, init_loss_scale=2.0**10)
    saver = tf1.train.Saver(max_to_keep=None)
    grads = kit_models.random_grads(3 * _RUNS)
    session.run(tf1.global_variables_initializer())
    for taken, each in enumerate(grads):
        saver.save(session, str(tmp_path / "model.ckpt"), taken, write_meta_graph=False)
        model.run(session, each)
    expected = kit_models.state(session)
    for taken in (2, 4, 7):
        with tf1.Session(graph=session.graph) as resumed:
            saver.restore(resumed, str(tmp_path / f"model.ckpt-{taken}"))
            for each in grads[taken:]:
                model.run(resumed, each)
            for name, value in kit_models.state(resumed).items():
                np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert expected["global_step"] == 3


def test_the_window_has_the_published_variables(session: tf1.Session) -> None:
    del session
    _windowed()
    with_window = {variable.op.name: variable for variable in tf1.global_variables()}
    with tf.Graph().as_default():
        kit_models.Model()
        without = {variable.op.name for variable in tf1.global_variables()}
    types = {name: with_window[name].dtype.base_dtype for name in set(with_window) - without}
    sums = {f"{name}/accum": tf.float32 for name in [*kit_models.START, "bert/unused"]}
    assert types == {"local_step": tf.int32, "batch_finite": tf.bool, **sums}
    assert not {"local_step", "batch_finite", *sums} & {each.op.name for each in tf1.trainable_variables()}
