"""Checkpoints that a script with the published `optimization.py` wrote."""

from pathlib import Path
from typing import Any

import kit_models
import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = [pytest.mark.graph, pytest.mark.usefixtures("no_graph_rewrite_after")]

tf1 = tf.compat.v1

_MANUAL = {"loss_scale": np.float32(512.0), "good_steps": np.int32(7), "bad_steps": np.int32(1)}
_MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "manual_fp16": ({"manual_fp16": True}, _MANUAL),
    "lamb": ({"optimizer_type": "lamb", "manual_fp16": True}, _MANUAL),
    "accumulation": (
        {"num_accumulation_steps": 4, "manual_fp16": True},
        {
            **_MANUAL,
            "local_step": np.int32(3),
            "batch_finite": np.bool_(True),
            "bert/unused/accum": np.float32(0.0),
            **{f"{name}/accum": np.full_like(value, 0.25) for name, value in kit_models.START.items()},
        },
    ),
}


def _written_by_the_original(path: Path, extra: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Write a checkpoint with the names and types of the original's variables."""
    values = {"global_step": np.int64(5), "bert/unused": np.float32(1.0), **extra}
    for index, (name, value) in enumerate(kit_models.START.items()):
        values |= {name: value + 1, f"{name}/adam_m": value / 2, f"{name}/adam_v": np.full_like(value, index + 1.0)}
    with tf.Graph().as_default(), tf1.Session() as session:
        for name, value in values.items():
            tf1.get_variable(name, initializer=value)
        session.run(tf1.global_variables_initializer())
        return tf1.train.Saver().save(session, str(path / "model.ckpt")), values


@pytest.mark.parametrize("mode", _MODES)
def test_a_checkpoint_of_the_original_restores_whole_and_goes_on(
    mode: str, session: tf1.Session, tmp_path: Path
) -> None:
    settings, extra = _MODES[mode]
    path, values = _written_by_the_original(tmp_path, extra)
    model = kit_models.Model(**settings)
    tf1.train.Saver().restore(session, path)
    state = {name.removesuffix("/value"): value for name, value in kit_models.state(session).items()}
    assert set(state) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    # With accumulation, this is the fourth run of the window in which the checkpoint was saved.
    assert model.run(session, kit_models.random_grads(1)[0], "step_update:0") == [6]
    moved = kit_models.state(session)
    for name, value in kit_models.START.items():
        assert not np.array_equal(moved[name], value + 1), name
    if extra:
        assert session.run("loss_scale:0") == 512.0


_REWRITTEN = {"current_loss_scale": np.float32(512.0), "good_steps": np.int64(7)}


@pytest.mark.parametrize("runs", [1, 2])
def test_a_checkpoint_of_the_graph_rewrite_restores_all_but_the_managers_variables(
    runs: int, session: tf1.Session, tmp_path: Path
) -> None:
    windows = {
        "local_step": np.int32(1),
        "batch_finite": np.bool_(True),
        "bert/unused/accum": np.float32(0.0),
        **{f"{name}/accum": np.full_like(value, 0.25) for name, value in kit_models.START.items()},
    }
    path, values = _written_by_the_original(tmp_path, {**_REWRITTEN, **(windows if runs > 1 else {})})
    # This is the recipe in docs/howto/porting.md.
    scale = tfmp.checkpoints.read_loss_scale_state(path).loss_scale
    model = kit_models.Model(use_fp16=True, init_loss_scale=scale, num_accumulation_steps=runs)
    managers = {"loss_scale", "good_steps", "bad_steps"}
    kept = [each for each in tf1.global_variables() if each.op.name.removesuffix("/value") not in managers]
    session.run(tf1.global_variables_initializer())
    tf1.train.Saver(tfmp.checkpoints.variable_map(path, kept)).restore(session, path)
    state = {name.removesuffix("/value"): value for name, value in kit_models.state(session).items()}
    assert set(state) - managers == set(values) - set(_REWRITTEN)
    for name in set(state) - managers:
        np.testing.assert_array_equal(state[name], values[name], err_msg=name)
    # With accumulation, this is the second run of the window in which the checkpoint was saved.
    assert model.run(session, kit_models.random_grads(1)[0], "step_update:0") == [6]
    assert session.run("loss_scale:0") == 512.0


def test_the_default_saver_does_not_restore_a_checkpoint_of_the_graph_rewrite(
    session: tf1.Session, tmp_path: Path
) -> None:
    path, _ = _written_by_the_original(tmp_path, _REWRITTEN)
    kit_models.Model(use_fp16=True)
    with pytest.raises((tf.errors.NotFoundError, tf.errors.InvalidArgumentError)):
        tf1.train.Saver().restore(session, path)
