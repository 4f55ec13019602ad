"""Checkpoints of TF1 optimizers: those of tf.contrib and of bare optimizers are restored, and tfmp's are like them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from faults import FAULTS
from kit import checks
from kit.hosts import V1Graph
from kit.oracle import Rule
from scenarios import STRUCTURE

import tfmp

tf1 = tf.compat.v1

_in_graphs = pytest.mark.graph

_RECORDINGS = Path(__file__).parent.parent / "recordings"
_OPTIMIZERS = {
    "adam": lambda: tf1.train.AdamOptimizer(0.01),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.0625, 0.875),
}


class Model:
    """The model whose checkpoints were recorded."""

    def __init__(self, optimizer: str) -> None:
        self.x = tf1.placeholder(tf.float32, [3])
        self.factor = tf1.placeholder(tf.float32, [])
        w = tf1.get_variable("w", initializer=tf.constant([0.5, -1.0, 2.0]))
        b = tf1.get_variable("b", initializer=tf.constant(0.25))
        loss = self.factor * (tf.reduce_sum(w * self.x) + b)
        global_step = tf1.train.get_or_create_global_step()
        manager = tfmp.ExponentialUpdateLossScaleManager(1024.0, 3, 2, 2, 0.5)
        self.train_op = tfmp.LossScaleOptimizer(_OPTIMIZERS[optimizer](), manager).minimize(loss, global_step)
        self.state = {"global_step": global_step, "w": w, "b": b} | {
            name: f"{name}:0" for name in ("loss_scale", "good_steps", "bad_steps")
        }

    def step(self, session: tf1.Session, recorded: dict[str, Any]) -> None:
        """Run a recorded step and compare the state after it."""
        session.run(self.train_op, {self.x: recorded["x"], self.factor: float(recorded["factor"])})
        for name, value in session.run(self.state).items():
            if name in ("w", "b"):
                np.testing.assert_allclose(value, recorded[name], rtol=1e-6)
            else:
                assert value == recorded[name], name


@_in_graphs
@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_checkpoint_equals_that_of_contrib_and_training_resumes_from_the_latter(
    session: tf1.Session, optimizer: str, tmp_path: Path
) -> None:
    expected, model = json.loads((_RECORDINGS / optimizer / "expected.json").read_text()), Model(optimizer)
    saved, recorded = expected["checkpoint_after_step"], str(_RECORDINGS / optimizer / "model.ckpt")
    session.run(tf1.global_variables_initializer())
    for step in expected["steps"][:saved]:
        model.step(session, step)
    ours, theirs = map(tf.train.load_checkpoint, (tf1.train.Saver().save(session, str(tmp_path / "m")), recorded))
    assert ours.get_variable_to_shape_map() == theirs.get_variable_to_shape_map()
    assert ours.get_variable_to_dtype_map() == theirs.get_variable_to_dtype_map()
    for name in theirs.get_variable_to_shape_map():
        np.testing.assert_allclose(ours.get_tensor(name), theirs.get_tensor(name), rtol=1e-6)
    session.run(tf1.global_variables_initializer())
    tf1.train.Saver().restore(session, recorded)
    assert len(expected["steps"]) == saved + 12
    for step in expected["steps"][saved:]:
        model.step(session, step)


@_in_graphs
def test_counts_of_steps_begin_anew_in_each_session_and_the_scale_goes_on(tmp_path: Path) -> None:
    host, (good, bad, *_) = V1Graph(STRUCTURE, Rule()), FAULTS["inf"].steps
    before = checks.train(host, [good, bad, bad])[-1]
    host.save(tmp_path)
    host.restore(tmp_path)
    restored, after = host.train([bad])
    told = [[state.told[name] for name in ("applied", "skipped", "in_a_row")] for state in (before, restored, after)]
    assert told == [[1, 2, 2], [0, 0, 0], [0, 1, 1]]
    assert checks.saved(restored) == checks.saved(before)


def _made_eagerly(wrapped: bool, *, compiled: bool = False) -> tuple[Callable[..., Any], tf.train.Checkpoint]:
    """Return a function that takes a step, given the factor of the gradient, and the checkpoint of the training."""
    weight, inner = tf.Variable(1.0), tf1.train.AdamOptimizer(0.5)
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000)
    opt = tfmp.LossScaleOptimizer(inner, manager) if wrapped else inner
    parts = {"manager": manager} if wrapped else {}

    def step(factor: tf.Tensor) -> None:
        opt.minimize(lambda: weight * weight * factor, var_list=[weight])

    run = tf.function(step) if compiled else step
    return lambda factor: run(tf.constant(factor)), tf.train.Checkpoint(weight=weight, optimizer=inner, **parts)


@pytest.mark.parametrize("wrapped", [False, True], ids=["tfmp-bare", "bare-tfmp"])
def test_run_moves_in_eager_code_between_an_optimizer_and_its_wrapper(wrapped: bool, tmp_path: Path) -> None:
    step, checkpoint = _made_eagerly(not wrapped)
    step(1.0)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    moved, other = _made_eagerly(wrapped)
    other.read(path).expect_partial()
    found = []
    for take, of_run in ((step, checkpoint), (moved, other)):
        take(1.0)
        found.append([float(of_run.weight), *sorted(float(each) for each in of_run.optimizer.variables())])
    assert found[0] == found[1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_checkpoint_saved_before_a_step_is_applied_loses_nothing(tmp_path: Path, compiled: bool) -> None:
    path = None
    for factors in ([1.0, 1.0], [math.inf]):
        step, checkpoint = _made_eagerly(True, compiled=compiled)
        if path:
            checkpoint.restore(path)
        for factor in factors:
            step(factor)
        path = checkpoint.save(str(tmp_path / "checkpoint"))
    # A checkpoint restores Adam's beta powers when Adam makes them. A skipped step would not make them by itself.
    reader = tf.train.load_checkpoint(path)
    powers = [reader.get_tensor(f"optimizer/beta{n}_power/.ATTRIBUTES/VARIABLE_VALUE") for n in (1, 2)]
    assert powers == pytest.approx([0.9**3, 0.999**3])


def test_variable_without_gradient_gets_no_slots() -> None:
    used, unused = tf.Variable(1.0), tf.Variable(1.0)
    opt = tfmp.LossScaleOptimizer(_OPTIMIZERS["momentum"](), 8)
    opt.minimize(lambda: used * math.inf, var_list=[used, unused])
    assert [variable.shape for variable in opt.variables()] == [[]]


def test_checkpoint_of_the_wrapper_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"tf\.train\.Checkpoint\(optimizer=opt, manager=manager\)"):
        tf.train.Checkpoint(opt=tfmp.LossScaleOptimizer(_OPTIMIZERS["adam"](), 8)).save(tmp_path / "checkpoint")
