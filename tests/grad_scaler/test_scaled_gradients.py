import math
from typing import Any

import pytest
import tensorflow as tf

import tfmp

pytestmark = pytest.mark.essential


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(1.0)


class _Fused:
    """Unscales and skips by itself, in one assignment."""

    def apply_scaled_gradients(self, grads_and_vars: Any, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation:
        return tf.group(
            *(
                variable.assign_sub(tf.where(finite, grad / loss_scale, tf.zeros_like(grad)))
                for grad, variable in grads_and_vars
            )
        )


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_optimizer_that_skips_itself_is_given_scale_and_decision(unscales: bool, enabled: bool) -> None:
    scaler, fused, ordinary = tfmp.GradScaler(8, enabled=enabled), _Fused(), _sgd()
    assert isinstance(fused, tfmp.grad_scaler.ScaledGradientsOptimizer)
    weights = [tf.Variable(0.0), tf.Variable(0.0)]

    @tf.function
    def iterate(grads: tf.Tensor) -> None:
        own, other = tf.unstack(scaler.scale(grads))
        if unscales:
            (own,) = scaler.unscale(fused, [own])
        scaler.step_all([(fused, [(own, weights[0])]), (ordinary, [(other, weights[1])])])
        scaler.update()

    iterate(tf.constant([1.0, 2.0]))
    assert [float(weight) for weight in weights] == [-1, -2]
    if enabled:
        iterate(tf.constant([1.0, math.inf]))
        iterate(tf.constant([math.nan, 1.0]))
        assert [float(weight) for weight in weights] == [-1, -2]
        iterate(tf.constant([4.0, 4.0]))
        assert [float(weight) for weight in weights] == [-5, -6]
        assert float(scaler.loss_scale) == 2


def test_optimizer_that_skips_itself_is_given_no_none() -> None:
    weight = tf.Variable(0.0)
    tfmp.GradScaler(8).step(_Fused(), [(None, tf.Variable(0.0)), (tf.constant(8.0), weight)])
    assert float(weight) == -1


def test_optimizer_that_skips_itself_divides_by_1_beside_the_window_of_a_disabled_scaler() -> None:
    scaler, fused, ordinary = tfmp.GradScaler(8, enabled=False), _Fused(), _sgd()
    weights = [tf.Variable(0.0), tf.Variable(0.0)]
    accumulator = tfmp.GradientAccumulator(weights[1:], 1)
    accumulator.add([tf.constant(3.0)])
    mean = scaler.unscale(ordinary, accumulator)
    scaler.step_all([(fused, [(tf.constant(2.0), weights[0])]), (ordinary, zip(mean, weights[1:], strict=True))])
    assert [float(weight) for weight in weights] == [-2, -3]


@pytest.mark.graph
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_session_that_runs_the_step_runs_that_of_the_optimizer(session: tf.compat.v1.Session, enabled: bool) -> None:
    scaler, weight = tfmp.GradScaler(8, enabled=enabled), tf.Variable(0.0, use_resource=True)
    step = scaler.step(_Fused(), [(scaler.scale(tf.constant(2.0)), weight)])
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(step)
    assert session.run(weight) == -2
