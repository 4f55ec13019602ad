"""Windows of micro-batches, and the checkpoints that a script with the published `optimization.py` wrote."""

from pathlib import Path
from typing import Any

import kit_models
import numpy as np
import pytest
import tensorflow as tf
from kit_models import START

import tfmp

pytestmark = [pytest.mark.graph, pytest.mark.usefixtures("no_graph_rewrite_after")]

tf1 = tf.compat.v1

_RUNS = 4
_FP16: dict[str, Any] = {"manual_fp16": True, "init_loss_scale": 2.0**10}


def _windowed(session: tf1.Session, **settings: Any) -> kit_models.Model:
    model = kit_models.Model(num_accumulation_steps=_RUNS, **settings)
    session.run(tf1.global_variables_initializer())
    return model


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


# In a single process, sharing after the accumulation changes nothing.
@pytest.mark.parametrize("shared_after", [False, True])
@pytest.mark.parametrize("bad", [None, _RUNS, 2 * _RUNS - 1])
def test_a_window_equals_the_large_batch_and_an_overflow_in_it_skips_it_alone(
    bad: int | None, shared_after: bool, session: tf1.Session
) -> None:
    settings = {"optimizer_type": "lamb", "clip_norm": 1e6, "allreduce_post_accumulation": shared_after, **_FP16}
    model = _windowed(session, **settings)
    grads = kit_models.random_grads(3 * _RUNS)
    if bad is not None:
        grads[bad] = kit_models.overflowing(grads[bad])
    fetched = [model.run(session, each, "update_step:0", "step_update:0") for each in grads]
    skipped = [bad is not None and run >= 2 * _RUNS for run in range(1, 3 * _RUNS + 1)]
    assert fetched == [[run % _RUNS == 0, run // _RUNS - skip] for run, skip in enumerate(skipped, 1)]
    with tf.Graph().as_default(), tf1.Session() as large:
        model = kit_models.Model(**settings)
        large.run(tf1.global_variables_initializer())
        for start in range(0, len(grads), _RUNS):
            model.run(large, [np.mean(each, axis=0) for each in zip(*grads[start : start + _RUNS], strict=True)])
        expected = kit_models.state(large)
    found = kit_models.state(session)
    _assert_same(found, expected)
    assert found["batch_finite"]
    sums = [value for name, value in found.items() if "accum" in name]
    assert sums
    assert all(np.isfinite(value).all() for value in sums)


def test_each_micro_batch_is_clipped_by_itself(session: tf1.Session) -> None:
    model = _windowed(session, clip_norm=2.0)
    grads = [np.zeros_like(value) for value in START.values()]
    # After the division by the 4 runs, the gradients have the norms 4, 16 and 4.
    for size in (16.0, 64.0, 4.0):
        grads[1] = np.float32([size, 0.0])
        model.run(session, grads)
    assert kit_models.state(session)["bert/bias/accum"].tolist() == [2.0 + 2.0 + 1.0, 0.0]


def test_finite_gradients_whose_squares_overflow_leave_a_window_finite(session: tf1.Session) -> None:
    model = _windowed(session)
    model.run(session, [np.full_like(value, 1e30) for value in START.values()])
    assert kit_models.state(session)["batch_finite"]
    model.run(session, kit_models.overflowing(kit_models.random_grads(1)[0]))
    assert not kit_models.state(session)["batch_finite"]


def test_a_window_goes_on_after_a_restart_at_any_micro_batch(session: tf1.Session, tmp_path: Path) -> None:
    model = _windowed(session, **_FP16)
    saver = tf1.train.Saver(max_to_keep=None)
    # The ops are made once: after each new op, the session would prepare the graph again.
    reads, grads = kit_models.reads(), kit_models.random_grads(3 * _RUNS)
    # The second window is skipped for its first run.
    grads[_RUNS] = kit_models.overflowing(grads[_RUNS])
    for taken, each in enumerate(grads):
        saver.save(session, str(tmp_path / "model.ckpt"), taken, write_meta_graph=False)
        model.run(session, each)
    expected = session.run(reads)
    assert expected["global_step"] == 2
    for taken in (1, 2, 3, _RUNS + 1):
        with tf1.Session(graph=session.graph) as resumed:
            saver.restore(resumed, str(tmp_path / f"model.ckpt-{taken}"))
            for each in grads[taken:]:
                model.run(resumed, each)
            _assert_same(resumed.run(reads), expected)


_MANUAL = {"loss_scale": np.float32(512.0), "good_steps": np.int32(7), "bad_steps": np.int32(1)}
_REWRITTEN = {"current_loss_scale": np.float32(512.0), "good_steps": np.int64(7)}
_MANAGERS = {"loss_scale", "good_steps", "bad_steps"}


def _window(local_step: int) -> dict[str, Any]:
    return {
        "local_step": np.int32(local_step),
        "batch_finite": np.bool_(True),
        "bert/unused/accum": np.float32(0.0),
        **{f"{name}/accum": np.full_like(value, 0.25) for name, value in START.items()},
    }


def _written_by_the_original(path: Path, extra: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Write a checkpoint with the names and types of the original's variables."""
    values = {"global_step": np.int64(5), "bert/unused": np.float32(1.0), **extra}
    for index, (name, value) in enumerate(START.items()):
        values |= {name: value + 1, f"{name}/adam_m": value / 2, f"{name}/adam_v": np.full_like(value, index + 1.0)}
    with tf.Graph().as_default(), tf1.Session() as session:
        for name, value in values.items():
            tf1.get_variable(name, initializer=value)
        session.run(tf1.global_variables_initializer())
        return tf1.train.Saver().save(session, str(path / "model.ckpt")), values


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        pytest.param({}, {}, id="fp32"),
        pytest.param({"manual_fp16": True}, _MANUAL, id="manual_fp16"),
        pytest.param({"manual_fp16": True, "optimizer_type": "lamb"}, _MANUAL, id="lamb"),
        pytest.param({"manual_fp16": True, "num_accumulation_steps": 4}, {**_MANUAL, **_window(3)}, id="accumulation"),
        pytest.param({"use_fp16": True}, _REWRITTEN, id="rewrite"),
        pytest.param(
            {"use_fp16": True, "num_accumulation_steps": 2}, {**_REWRITTEN, **_window(1)}, id="rewrite-window"
        ),
    ],
)
def test_a_checkpoint_of_the_original_holds_the_variables_of_a_run_restores_whole_and_goes_on(
    settings: dict[str, Any], extra: dict[str, Any], session: tf1.Session, tmp_path: Path
) -> None:
    path, values = _written_by_the_original(tmp_path, extra)
    if "use_fp16" in settings:
        # The recipe in docs/howto/porting.md: of a graph rewrite, all but the manager's variables are restored.
        scale = tfmp.checkpoints.read_loss_scale_state(path).loss_scale
        model = kit_models.Model(init_loss_scale=scale, **settings)
        with pytest.raises((tf.errors.NotFoundError, tf.errors.InvalidArgumentError)):
            tf1.train.Saver().restore(session, path)
        kept = [each for each in tf1.global_variables() if each.op.name.removesuffix("/value") not in _MANAGERS]
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver(tfmp.checkpoints.variable_map(path, kept)).restore(session, path)
        values = {name: value for name, value in values.items() if name not in _REWRITTEN}
    else:
        model = kit_models.Model(**settings)
        tf1.train.Saver().restore(session, path)
    state = {name.removesuffix("/value"): value for name, value in kit_models.state(session).items()}
    assert set(state) == {*values, *(_MANAGERS if extra else ())}
    assert {each.op.name for each in tf1.trainable_variables()} == {*START, "bert/unused"}
    rewrites = tf.config.optimizer.get_experimental_options().get("auto_mixed_precision", False)
    assert rewrites is ("use_fp16" in settings)
    _assert_same(state, values)
    # With accumulation, this is the last run of the window in which the checkpoint was saved.
    assert model.run(session, kit_models.random_grads(1)[0], "step_update:0") == [6]
    moved = kit_models.state(session)
    assert [name for name, value in START.items() if np.array_equal(moved[name], value + 1)] == []
    if extra:
        assert session.run("loss_scale:0") == 512.0
