"""Tests of every optimizer of every Keras, on one device: it trains as without a wrapper, and skips whole steps."""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import tensorflow as tf
from kerases import (
    SCALE,
    assert_trains_as,
    for_every_optimizer,
    gradients,
    kernel_and_bias,
    optimizer,
    take_step,
    values,
    values_but_state,
    wrap,
)

import tfmp


@for_every_optimizer()
def test_wrapped_training_equals_training_without_wrapper_but_for_overflows(
    keras: ModuleType, name: str, options: dict[str, Any]
) -> None:
    inner, plain = optimizer(keras, name, **options), optimizer(keras, name, **options)
    opt = wrap(inner)
    variables, plain_variables = kernel_and_bias(keras), kernel_and_bias(keras)
    for seed, last in enumerate([None, math.inf, None, -math.inf, math.nan, None]):
        take_step(opt, variables, gradients(seed, last))
        if last is None:
            take_step(plain, plain_variables, gradients(seed))
        assert values([*variables, *inner.variables]) == values([*plain_variables, *plain.variables])
        assert int(opt.iterations) == int(plain.iterations)
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (SCALE / 8, 3, 3)
    opt.finalize_variable_values(variables)
    plain.finalize_variable_values(plain_variables)
    assert values(variables) == values(plain_variables)


@for_every_optimizer("plain")
def test_step_that_xla_compiles_as_a_whole_trains_as_without_wrapper(
    keras: ModuleType, name: str, options: dict[str, Any]
) -> None:
    opt = wrap(optimizer(keras, name, **options))
    assert_trains_as(optimizer(keras, name, **options), opt, keras, functools.partial(tf.function, jit_compile=True))


@for_every_optimizer()
def test_compiled_update_trains_as_without_wrapper(keras: ModuleType, name: str, options: dict[str, Any]) -> None:
    opt = _compiling(optimizer(keras, name, **options))
    assert_trains_as(optimizer(keras, name, **options), opt, keras, tf.function)


@for_every_optimizer("plain", "global_clipnorm")
def test_compiled_update_in_eager_mode_trains_as_without_wrapper(
    keras: ModuleType, name: str, options: dict[str, Any]
) -> None:
    def in_eager_mode(step: Callable[..., None]) -> Callable[..., None]:
        return step

    opt = _compiling(optimizer(keras, name, **options))
    assert_trains_as(optimizer(keras, name, **options), opt, keras, in_eager_mode, in_eager_mode)


def _compiling(inner: Any) -> Any:
    manager = tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000, 1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner, manager, jit_compile=True)


@for_every_optimizer("plain", "ema", "accumulation")
def test_skipped_step_changes_nothing_but_the_scale(keras: ModuleType, name: str, options: dict[str, Any]) -> None:
    variables = kernel_and_bias(keras)
    opt = wrap(optimizer(keras, name, **options))
    opt.build(variables)

    @tf.function
    def step(*grads: tf.Tensor) -> None:
        take_step(opt, variables, grads)

    step(*gradients(0))
    before = [*values(variables), *values_but_state(opt), int(opt.iterations)]
    for bad in (math.inf, -math.inf, math.nan):
        step(*gradients(1, last=bad))
        assert [*values(variables), *values_but_state(opt), int(opt.iterations)] == before
        assert not opt.last_step_finite
    assert (int(opt.applied_steps), int(opt.skipped_steps), int(opt.consecutive_skipped_steps)) == (1, 3, 3)
    assert float(opt.loss_scale) == SCALE / 8
    step(*gradients(1))
    assert [*values(variables), *values_but_state(opt), int(opt.iterations)] != before
    assert (int(opt.applied_steps), int(opt.skipped_steps), int(opt.consecutive_skipped_steps)) == (2, 3, 0)
    assert opt.last_step_finite
