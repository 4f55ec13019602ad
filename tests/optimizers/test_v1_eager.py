"""The wrapper around TF1 optimizers in eager code, where a loss is a function."""

import math
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp


def _opt() -> tfmp.LossScaleOptimizer:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(tf.compat.v1.train.MomentumOptimizer(0.5, 0.5), manager)


@pytest.mark.parametrize("wrapped", [False, True], ids=["tfmp-bare", "bare-tfmp"])
def test_run_moves_between_an_optimizer_and_its_wrapper(wrapped: bool, tmp_path: Path) -> None:
    def make(wrapped: bool) -> tuple[Any, tf.train.Checkpoint]:
        weight, inner = tf.Variable(1.0), tf.compat.v1.train.AdamOptimizer(0.5)
        manager = tfmp.FixedLossScaleManager(8)
        opt = tfmp.LossScaleOptimizer(inner, manager) if wrapped else inner
        parts = {"manager": manager} if wrapped else {}
        return lambda: opt.minimize(lambda: weight * weight, var_list=[weight]), tf.train.Checkpoint(
            weight=weight, optimizer=inner, **parts
        )

    def trained(step: Any, checkpoint: tf.train.Checkpoint) -> list[float]:
        step()
        powers = checkpoint.optimizer.variables()
        return [float(checkpoint.weight), *sorted(float(each) for each in powers)]

    step, checkpoint = make(not wrapped)
    trained(step, checkpoint)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    moved, other = make(wrapped)
    other.read(path).expect_partial()
    assert trained(moved, other) == trained(step, checkpoint)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_checkpoint_saved_before_a_step_is_applied_loses_nothing(tmp_path: Path, compiled: bool) -> None:
    def run(factors: list[float], restore: str | None = None) -> str:
        weight, inner = tf.Variable(1.0), tf.compat.v1.train.AdamOptimizer(0.5)
        manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000)
        opt = tfmp.LossScaleOptimizer(inner, manager)
        checkpoint = tf.train.Checkpoint(weight=weight, optimizer=inner, manager=manager)
        if restore:
            checkpoint.restore(restore)

        def step(factor: tf.Tensor) -> None:
            opt.minimize(lambda: weight * factor, var_list=[weight])

        step = tf.function(step) if compiled else step
        for factor in factors:
            step(tf.constant(factor))
        return checkpoint.save(str(tmp_path / "checkpoint"))

    # A checkpoint restores Adam's beta powers when Adam makes them. A skipped step would not make them by itself.
    reader = tf.train.load_checkpoint(run([math.inf], restore=run([1.0, 1.0])))
    powers = [reader.get_tensor(f"optimizer/beta{n}_power/.ATTRIBUTES/VARIABLE_VALUE") for n in (1, 2)]
    assert powers == pytest.approx([0.9**3, 0.999**3])


def test_variable_without_gradient_gets_no_slots() -> None:
    used, unused = tf.Variable(1.0), tf.Variable(1.0)
    opt = _opt()
    opt.minimize(lambda: used * math.inf, var_list=[used, unused])
    assert [variable.shape for variable in opt.variables()] == [[]]


def test_callable_loss_works_in_a_graph() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        w = tf.compat.v1.get_variable("w", initializer=1.0)
        train_op = _opt().minimize(lambda: w * 1.0)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train_op)
        assert session.run(w) == 0.5


def test_reference_variable_is_refused_with_control_flow_v2() -> None:
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=1.0, use_resource=False)
        opt = _opt()
        with pytest.raises(ValueError, match=r"w:0 is a reference variable.*disable_v2_behavior\(\)"):
            opt.minimize(w * 1.0)


def test_checkpoint_of_the_wrapper_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"tf\.train\.Checkpoint\(optimizer=opt, manager=manager\)"):
        tf.train.Checkpoint(opt=_opt()).save(tmp_path / "checkpoint")


def test_reference_global_step_is_refused_before_anything_is_made() -> None:
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=1.0)
        global_step = tf.compat.v1.get_variable("step", initializer=0, trainable=False, use_resource=False)
        opt = _opt()
        before = len(tf.compat.v1.global_variables())
        with pytest.raises(ValueError, match="step:0 is a reference variable"):
            opt.minimize(w * 1.0, global_step)
        assert len(tf.compat.v1.global_variables()) == before
