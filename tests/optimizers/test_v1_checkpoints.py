"""Checkpoints of tf.contrib can be restored, and those of tfmp hold the same variables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = pytest.mark.graph

_RECORDINGS = Path(__file__).parent.parent / "recordings"
_OPTIMIZERS = {
    "adam": lambda: tf.compat.v1.train.AdamOptimizer(0.01),
    "momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.0625, 0.875),
}


class Model:
    """The model whose checkpoints were recorded."""

    def __init__(self, optimizer: str) -> None:
        self.x = tf.compat.v1.placeholder(tf.float32, [3])
        self.factor = tf.compat.v1.placeholder(tf.float32, [])
        w = tf.compat.v1.get_variable("w", initializer=tf.constant([0.5, -1.0, 2.0]))
        b = tf.compat.v1.get_variable("b", initializer=tf.constant(0.25))
        loss = self.factor * (tf.reduce_sum(w * self.x) + b)
        global_step = tf.compat.v1.train.get_or_create_global_step()
        manager = tfmp.ExponentialUpdateLossScaleManager(1024.0, 3, 2, 2, 0.5)
        self.train_op = tfmp.LossScaleOptimizer(_OPTIMIZERS[optimizer](), manager).minimize(loss, global_step)
        self.state = {"global_step": global_step, "w": w, "b": b} | {
            name: f"{name}:0" for name in ("loss_scale", "good_steps", "bad_steps")
        }

    def step(self, session: tf.compat.v1.Session, recorded: dict[str, Any]) -> None:
        """Run a recorded step and compare the state after it."""
        session.run(self.train_op, {self.x: recorded["x"], self.factor: float(recorded["factor"])})
        for name, value in session.run(self.state).items():
            if name in ("w", "b"):
                np.testing.assert_allclose(value, recorded[name], rtol=1e-6)
            else:
                assert value == recorded[name], name


def _expected(optimizer: str) -> dict[str, Any]:
    return json.loads((_RECORDINGS / optimizer / "expected.json").read_text())


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_training_resumes_from_a_contrib_checkpoint(session: tf.compat.v1.Session, optimizer: str) -> None:
    expected = _expected(optimizer)
    model = Model(optimizer)
    tf.compat.v1.train.Saver().restore(session, str(_RECORDINGS / optimizer / "model.ckpt"))
    remaining = expected["steps"][expected["checkpoint_after_step"] :]
    assert len(remaining) == 12
    for recorded in remaining:
        model.step(session, recorded)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_checkpoint_equals_that_of_contrib(session: tf.compat.v1.Session, optimizer: str, tmp_path: Path) -> None:
    expected = _expected(optimizer)
    model = Model(optimizer)
    session.run(tf.compat.v1.global_variables_initializer())
    for recorded in expected["steps"][: expected["checkpoint_after_step"]]:
        model.step(session, recorded)
    ours = tf.train.load_checkpoint(tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt")))
    theirs = tf.train.load_checkpoint(str(_RECORDINGS / optimizer / "model.ckpt"))
    assert ours.get_variable_to_shape_map() == theirs.get_variable_to_shape_map()
    assert ours.get_variable_to_dtype_map() == theirs.get_variable_to_dtype_map()
    for name in theirs.get_variable_to_shape_map():
        np.testing.assert_allclose(ours.get_tensor(name), theirs.get_tensor(name), rtol=1e-6)
