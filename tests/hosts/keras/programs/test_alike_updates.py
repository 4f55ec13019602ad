"""Tests of updates that share compiled programs: those of variables of one shape, in every Keras."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, for_every_optimizer, optimizer, values, variable
from many_variables import SHAPES, apply, assert_train_alike, gradients, make_variables, wrapped

import tfmp


@for_every_optimizer("plain", "schedule", "weight_decay", "ema")
def test_each_variable_is_updated_with_its_own_slots(keras: ModuleType, name: str, options: dict[str, Any]) -> None:
    assert_train_alike(wrapped(optimizer(keras, name, **options)), optimizer(keras, name, **options), keras)


@for_every_keras()
def test_variables_that_do_not_decay_share_no_program_with_others(keras: ModuleType) -> None:
    def decaying() -> Any:
        made = optimizer(keras, "AdamW", weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=["w2", "w4"])
        return made

    assert_train_alike(wrapped(decaying()), decaying(), keras)


@for_every_keras()
def test_sparse_gradients_have_programs_of_their_own(keras: ModuleType) -> None:
    variables, plain_variables = make_variables(keras), make_variables(keras)
    plain = optimizer(keras, "Adam")
    opt = wrapped(optimizer(keras, "Adam"))
    opt.build(variables)
    plain.build(plain_variables)

    def with_sparse(seed: int) -> list[Any]:
        first, *others = gradients(seed)
        return [tf.IndexedSlices(first[:1], tf.constant([seed % 2]), tf.constant([2, 3])), *others]

    step = tf.function(lambda grads: apply(opt, variables, grads))
    for seed in range(3):
        step(with_sparse(seed))
        plain.apply_gradients(zip(with_sparse(seed), plain_variables, strict=True))
    for one, other in zip(variables, plain_variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


@for_every_keras("keras3")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_precision_state_is_rounded_as_without_sharing(keras: ModuleType, rounding: str, dtype: str) -> None:
    if (rounding, dtype) == ("nearest", "bfloat16"):
        pytest.skip("weights in half precision are rounded stochastically only")

    def trained(*, jit_compile: bool) -> list[Any]:
        inner = optimizer(keras, "SGD", learning_rate=0.5, momentum=0.5)
        half = tfmp.half_state(inner, momentum="bfloat16", rounding=rounding, seed=3)
        opt = tfmp.LossScaleOptimizer(half, tfmp.FixedLossScaleManager(SCALE), jit_compile=jit_compile)
        variables = [variable(keras, np.zeros(shape), dtype=dtype) for shape in SHAPES]
        opt.build(variables)
        step = tf.function(lambda grads: apply(opt, variables, grads))
        for seed in range(3):
            rng = np.random.default_rng(seed)
            # Float32 computes exactly on these, and bfloat16 must round them.
            step([tf.constant(rng.integers(-2048, 2048, shape) / 1024, tf.float32) for shape in SHAPES])
        return values([*variables, *inner.variables])

    assert trained(jit_compile=True) == trained(jit_compile=False)
