"""Checkpoints of tf.contrib can be restored, and those of tfmp hold the same variables."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = [pytest.mark.graph]

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


def _train_op(optimizer: str, wrapped: bool) -> tf.Operation:
    """Build a model with an optimizer, in a wrapper or not, and return the op of its step."""
    w = tf.compat.v1.get_variable("w", initializer=[0.5, -1.0, 2.0], use_resource=True)
    opt = _OPTIMIZERS[optimizer]()
    if wrapped:
        opt = tfmp.LossScaleOptimizer(opt, tfmp.ExponentialUpdateLossScaleManager(8, 1000))
    return opt.minimize(tf.reduce_sum(w * w), tf.compat.v1.train.get_or_create_global_step())


def _without_the_managers() -> list[Any]:
    """Return the variables that a run without loss scaling has too."""
    of_manager = {"loss_scale", "good_steps", "bad_steps"}
    return [each for each in tf.compat.v1.global_variables() if each.op.name.split("/")[0] not in of_manager]


def _values(session: tf.compat.v1.Session) -> dict[str, Any]:
    # The powers of Adam have a scope within a conditional.
    return {each.op.name.removeprefix("cond/"): session.run(each).tolist() for each in _without_the_managers()}


@pytest.mark.parametrize("wrapped", [False, True], ids=["tfmp-bare", "bare-tfmp"])
@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_run_moves_between_an_optimizer_and_its_wrapper(optimizer: str, wrapped: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        train_op = _train_op(optimizer, not wrapped)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(train_op)
        tf.compat.v1.train.Saver().save(session, path)
        saved = _values(session)
        session.run(train_op)
        expected = _values(session)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        train_op = _train_op(optimizer, wrapped)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver(tfmp.checkpoints.variable_map(path, _without_the_managers())).restore(session, path)
        assert _values(session) == saved
        session.run(train_op)
        # The scale is a power of two, so unscaling is exact.
        assert _values(session) == expected
    assert saved["global_step"] == 3


def test_scaffold_restores_a_run_without_loss_scaling_in_a_new_directory(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        train_op = _train_op("adam", wrapped=False)
        with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path / "old")) as session:
            for _ in range(3):
                session.run(train_op)
            saved = _values(session)
    path = tf.train.latest_checkpoint(tmp_path / "old")
    for steps in (0, 3):
        with tf.Graph().as_default():
            train_op = _train_op("adam", wrapped=True)
            saver = tf.compat.v1.train.Saver(tfmp.checkpoints.variable_map(path, _without_the_managers()))
            scaffold = tf.compat.v1.train.Scaffold(init_fn=lambda _, session, saver=saver: saver.restore(session, path))
            with tf.compat.v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path / "new"), scaffold=scaffold
            ) as session:
                values = _values(session)
                # The second run goes on from what the first saved in the new directory.
                assert values["global_step"] == 3 + steps
                assert steps or values == saved
                for _ in range(3):
                    session.run(train_op)


def _model_fn(wrapped: bool, path: str | None = None) -> Callable[..., Any]:
    """Return the function of an Estimator, which starts from a checkpoint of another one if there is one."""

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        train_op = _train_op("adam", wrapped)
        scaffold = None
        if path:
            saver = tf.compat.v1.train.Saver(tfmp.checkpoints.variable_map(path, _without_the_managers()))
            scaffold = tf.compat.v1.train.Scaffold(init_fn=lambda _, session: saver.restore(session, path))
        return tf.estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=train_op, scaffold=scaffold)

    return model_fn


def _of_estimator(estimator: Any) -> dict[str, Any]:
    names = ("w", "w/Adam", "w/Adam_1", "global_step")
    return {name: estimator.get_variable_value(name).tolist() for name in names}


@pytest.mark.estimator
@pytest.mark.parametrize("wrapped", [False, True], ids=["tfmp-bare", "bare-tfmp"])
def test_estimator_goes_on_with_a_run_in_a_new_directory(wrapped: bool, tmp_path: Path) -> None:
    def inputs() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((0.0, 0.0)).repeat()

    old = tf.estimator.Estimator(_model_fn(not wrapped), tmp_path / "old")
    old.train(inputs, steps=3)
    new = tf.estimator.Estimator(_model_fn(wrapped, old.latest_checkpoint()), tmp_path / "new")
    new.train(inputs, steps=1)
    old.train(inputs, steps=1)
    assert _of_estimator(new) == _of_estimator(old)
    # Then it goes on from its own directory.
    for each in (new, old):
        each.train(inputs, steps=1)
    assert _of_estimator(new) == _of_estimator(old)
    assert _of_estimator(new)["global_step"] == 5
