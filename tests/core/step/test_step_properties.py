"""What users read of the steps of a wrapped optimizer, also of one that drops single micro-batches."""

import math
from types import ModuleType

import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, variable

import tfmp

tf1 = tf.compat.v1

#: Windows of two micro-batches; whether the step was applied, whether it was finite, and the weight after it.
_WINDOWS = [
    ([1.0, 1.0], True, True, 3.5),
    ([1.0, math.inf], True, False, 3.0),
    ([math.nan, math.inf], False, False, 3.0),
    ([1.0, 3.0], True, True, 2.0),
]


def _manager() -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(64, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def _read(opt: tfmp.LossScaleOptimizer) -> tuple[tf.Tensor, ...]:
    return (
        opt.last_step_applied,
        opt.last_step_finite,
        opt.loss_scale,
        opt.attempted_steps,
        opt.applied_steps,
        opt.skipped_steps,
        opt.consecutive_skipped_steps,
    )


def _numbers(opt: tfmp.LossScaleOptimizer) -> list[float]:
    return [value.numpy().item() for value in _read(opt)]


def test_nothing_was_skipped_before_the_first_step() -> None:
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), _manager())
    assert _numbers(opt) == [True, True, 64, 0, 0, 0, 0]


def test_step_that_overflowed_is_neither_applied_nor_finite() -> None:
    opt, weight = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), _manager()), tf.Variable(4.0)
    found = []
    for factor in (1.0, math.inf, math.nan, 1.0):
        opt.minimize(lambda factor=factor: weight * factor, var_list=[weight])
        found.append(_numbers(opt))
    assert found == [
        [True, True, 64, 1, 1, 0, 0],
        [False, False, 32, 2, 1, 1, 1],
        [False, False, 16, 3, 1, 2, 2],
        [True, True, 16, 4, 2, 2, 0],
    ]


@for_every_keras()
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_step_without_an_overflowing_micro_batch_is_applied_and_not_finite(keras: ModuleType, compiled: bool) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), _manager(), accumulation_steps=2, overflow_drops="micro_batch")
    weight = variable(keras, 4.0)
    opt.build([weight])

    def take(factor: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(weight * factor)
        opt.apply_gradients([(tape.gradient(loss, weight), weight)])

    run = tf.function(take) if compiled else take
    for micro_batches, applied, finite, value in _WINDOWS:
        for factor in micro_batches:
            run(tf.constant(factor))
        assert (bool(opt.last_step_applied), bool(opt.last_step_finite)) == (applied, finite)
        assert float(weight.numpy()) == value
    assert _numbers(opt)[3:] == [4, 3, 1, 0]


@pytest.mark.graph
def test_step_of_a_graph_without_an_overflowing_micro_batch_is_applied_and_not_finite(session: tf1.Session) -> None:
    factor, weight = tf1.placeholder(tf.float32, []), tf1.get_variable("weight", initializer=4.0)
    inner = tf1.train.GradientDescentOptimizer(0.5)
    opt = tfmp.LossScaleOptimizer(inner, _manager(), accumulation_steps=2, overflow_drops="micro_batch")
    train_op = opt.minimize(weight * factor, var_list=[weight])
    status = _read(opt)
    session.run(tf1.global_variables_initializer())
    for micro_batches, applied, finite, value in _WINDOWS:
        for each in micro_batches:
            session.run(train_op, {factor: each})
        assert session.run(status[:2]) == (applied, finite)
        assert session.run(weight) == value
    assert session.run(status[3:]) == (4, 3, 1, 0)


@pytest.mark.graph
def test_optimizer_shows_its_manager_and_in_eager_programs_its_steps() -> None:
    manager = "<ExponentialUpdateLossScaleManager(init_loss_scale=64.0, incr_every_n_steps=1000, decr_every_n_nan"
    with tf.Graph().as_default():
        opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), _manager())
        assert repr(opt).startswith("<tfmp.LossScaleOptimizer(")
        assert manager in repr(opt)
        assert "applied_steps" not in repr(opt)


def test_optimizer_shows_its_steps_while_a_function_is_traced_too() -> None:
    opt, weight = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), _manager()), tf.Variable(4.0)
    for factor in (1.0, math.inf):
        opt.minimize(lambda factor=factor: weight * factor, var_list=[weight])
    shown: list[str] = []
    tf.function(lambda: shown.append(repr(opt)))()
    assert shown == [repr(opt)]
    assert repr(opt).endswith(">): applied_steps=1, skipped_steps=1>")


def test_ranges_of_gradients_are_recorded_in_one_object() -> None:
    scaler = tfmp.GradScaler()
    ranges = scaler.record_gradient_ranges()
    assert ranges is not None
    assert scaler.record_gradient_ranges() is ranges
