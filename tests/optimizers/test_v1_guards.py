"""The warning for scripts whose loss is never scaled, and its absence for all others."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmp

_INNER = tf.compat.v1.train.GradientDescentOptimizer


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="tfmp")


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfmp"]


def _wrap() -> Any:
    return tfmp.LossScaleOptimizer(_INNER(0.5), tfmp.FixedLossScaleManager(8))


def _variable(use_resource: bool = True) -> tf.Variable:
    return tf.compat.v1.get_variable("w", initializer=[1.0, 2.0], use_resource=use_resource)


@pytest.mark.graph
# With control flow v2 only resource variables can be updated conditionally, so False is skipped there.
@pytest.mark.parametrize("use_resource", [True, False])
def test_script_that_calls_tf_gradients_is_warned_once_with_the_line(
    caplog: pytest.LogCaptureFixture, use_resource: bool
) -> None:
    if not use_resource and tf.compat.v1.control_flow_v2_enabled():
        pytest.skip("control flow v2 cannot update a reference variable")
    with tf.Graph().as_default():
        w, opt = _variable(use_resource), _wrap()

        def gradients() -> list[tf.Tensor]:
            return tf.gradients(tf.reduce_sum(w), [w])

        for _ in range(2):
            grads, _ = tf.clip_by_global_norm(gradients(), 1.0)
            opt.apply_gradients(zip(grads, [w], strict=True))
    (warning,) = _warnings(caplog)
    assert warning.startswith(f"test_v1_guards.py:{gradients.__code__.co_firstlineno + 1}: ")
    assert "grads_and_vars = opt.compute_gradients(loss, variables) in place of tf.gradients" in warning


def _minimized(w: tf.Variable) -> None:
    _wrap().minimize(tf.reduce_sum(w))


def _clipped(w: tf.Variable) -> None:
    opt = _wrap()
    ((grad, _),) = opt.compute_gradients(tf.reduce_sum(w), [w])
    opt.apply_gradients([(tf.clip_by_norm(grad, 1.0), w)])


def _applied_by_another_wrapper(w: tf.Variable) -> None:
    ((grad, _),) = _wrap().compute_gradients(tf.reduce_sum(w), [w])
    _wrap().apply_gradients([(tf.clip_by_norm(grad, 1.0), w)])


def _synchronized(w: tf.Variable) -> None:
    opt = tf.compat.v1.train.SyncReplicasOptimizer(_wrap(), 1)
    opt.minimize(tf.reduce_sum(w), tf.compat.v1.train.get_or_create_global_step())


@pytest.mark.graph
@pytest.mark.parametrize("way", [_minimized, _clipped, _applied_by_another_wrapper, _synchronized])
def test_script_that_scales_its_loss_is_not_warned(
    caplog: pytest.LogCaptureFixture, way: Callable[[tf.Variable], None]
) -> None:
    with tf.Graph().as_default():
        way(_variable())
    assert not _warnings(caplog)


_MANAGERS = [tfmp.FixedLossScaleManager, lambda scale: tfmp.ExponentialUpdateLossScaleManager(scale, 1000)]


@pytest.mark.graph
@pytest.mark.parametrize("manager_of", _MANAGERS, ids=["fixed", "exponential"])
@pytest.mark.parametrize(
    "unscale",
    [
        lambda grad, scale: grad / scale,
        lambda grad, scale: tf.clip_by_global_norm([grad * tf.cast(1.0 / scale, grad.dtype)], 10.0)[0][0],
    ],
    ids=["divided", "multiplied and clipped"],
)
def test_script_that_scales_by_hand_with_the_managers_scale_is_not_warned(
    caplog: pytest.LogCaptureFixture,
    manager_of: Callable[[float], tfmp.LossScaleManager],
    unscale: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        manager = manager_of(8)
        w, opt, scale = _variable(), tfmp.LossScaleOptimizer(_INNER(0.5), manager), manager.get_loss_scale()
        (grad,) = tf.gradients(tf.reduce_sum(w) * scale, [w])
        step = opt.apply_gradients([(unscale(grad, scale), w)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step)
        assert session.run(w).tolist() == [0.5, 1.5]
    assert not _warnings(caplog)


@pytest.mark.graph
def test_script_that_does_not_divide_by_the_managers_scale_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default():
        w, opt = _variable(), _wrap()
        (grad,) = tf.gradients(tf.reduce_sum(w) * opt.loss_scale, [w])
        opt.apply_gradients([(tf.clip_by_norm(grad, 1.0), w)])
    assert len(_warnings(caplog)) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_eager_code_is_warned_about_a_tape_but_not_about_minimize(
    caplog: pytest.LogCaptureFixture, compiled: bool
) -> None:
    w, opt, other = tf.Variable([1.0, 2.0]), _wrap(), _wrap()

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w)
        grad = tape.gradient(loss, w)  # the line, where there is a graph
        opt.apply_gradients([(grad, w)])  # the line, in eager code

    def minimize() -> None:
        other.minimize(lambda: tf.reduce_sum(w), var_list=[w])

    for take in (minimize, step):
        for _ in range(2):
            (tf.function(take) if compiled else take)()
    (warning,) = _warnings(caplog)
    assert warning.startswith(f"test_v1_guards.py:{step.__code__.co_firstlineno + (3 if compiled else 4)}: ")
