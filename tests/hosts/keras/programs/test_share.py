"""Tests of updates that share compiled programs: those of variables of one shape, in every Keras."""

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, for_every_optimizer, optimizer, values, variable

import tfmp
from tfmp.core.gradients import arithmetic

#: The shapes of the variables: five of one, which take programs for two and for one, and three of another.
_SHAPES = [(2, 3), (3,), (2, 3), (2, 3), (3,), (2, 3), (3,), (2, 3), (4,)]


def _variables(keras: ModuleType) -> list[Any]:
    rng = np.random.default_rng(0)
    return [variable(keras, rng.normal(size=shape), f"w{place}") for place, shape in enumerate(_SHAPES)]


def _gradients(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in _SHAPES]


def _wrapped(inner: Any, **settings: Any) -> Any:
    return tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE), jit_compile=True, **settings)


def _apply(opt: Any, variables: list[Any], grads: list[Any]) -> None:
    """Apply the gradients of a loss that is scaled, as a wrapper of each Keras takes them."""
    scaled = [arithmetic.map_values(lambda values: values * SCALE, grad) for grad in grads]
    if not hasattr(opt, "apply"):
        scaled = opt.get_unscaled_gradients(scaled)
    opt.apply_gradients(zip(scaled, variables, strict=True))


def _assert_train_alike(opt: Any, plain: Any, keras: ModuleType, *, eagerly: bool = False) -> None:
    """Assert that each of many variables, its slots and the count of steps end as without a wrapper."""
    variables, plain_variables = _variables(keras), _variables(keras)
    opt.build(variables)
    plain.build(plain_variables)

    def step(grads: list[Any]) -> None:
        _apply(opt, variables, grads)

    def plain_step(grads: list[Any]) -> None:
        plain.apply_gradients(zip(grads, plain_variables, strict=True))

    # Nadam of Keras 2 counts steps in Python while a function is traced, so both are traced.
    steps = [step, plain_step] if eagerly else [tf.function(step), tf.function(plain_step)]
    for seed in range(4):
        for take_step in steps:
            take_step(_gradients(seed))
    pairs = zip([*variables, *opt.inner_optimizer.variables], [*plain_variables, *plain.variables], strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


@for_every_optimizer("plain", "schedule", "weight_decay", "ema")
def test_each_variable_is_updated_with_its_own_slots(keras: ModuleType, name: str, options: dict[str, Any]) -> None:
    _assert_train_alike(_wrapped(optimizer(keras, name, **options)), optimizer(keras, name, **options), keras)


@for_every_keras()
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}])
def test_programs_are_shared_in_eager_code(keras: ModuleType, options: dict[str, Any]) -> None:
    opt = _wrapped(optimizer(keras, "Adam", **options))
    _assert_train_alike(opt, optimizer(keras, "Adam", **options), keras, eagerly=True)
    # They are those of one setting: nothing that is noted when they are made counts as another one.
    assert len(opt._compilers.of(opt.inner_optimizer).programs) == 1


@for_every_keras()
def test_variables_that_do_not_decay_share_no_program_with_others(keras: ModuleType) -> None:
    def decaying() -> Any:
        made = optimizer(keras, "AdamW", weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=["w2", "w4"])
        return made

    _assert_train_alike(_wrapped(decaying()), decaying(), keras)


@for_every_keras("keras3")
def test_constraints_hold_for_their_variables_alone(keras: ModuleType) -> None:
    opt, variables = _wrapped(optimizer(keras, learning_rate=0.0)), _variables(keras)
    variables[2].constraint = keras.constraints.NonNeg()
    before = values(variables)
    opt.build(variables)
    tf.function(lambda: opt.apply(_gradients(0), variables))()
    expected = [np.maximum(value, 0).tolist() if place == 2 else value for place, value in enumerate(before)]
    assert values(variables) == expected != before


@for_every_keras()
@pytest.mark.parametrize(
    ("options", "num_programs"),
    # Two kernels, one kernel, one bias, and the last. A program for all, where one must see all.
    [({}, 4), ({"global_clipnorm": 1.0}, 4), ({"clipnorm": 1.0}, 4), ({"use_ema": True}, 1)],
)
def test_one_program_updates_all_variables_that_are_alike(
    keras: ModuleType, options: dict[str, Any], num_programs: int
) -> None:
    opt, variables = _wrapped(optimizer(keras, "Adam", **options)), _variables(keras)
    opt.build(variables)

    def step(grads: list[Any]) -> None:
        _apply(opt, variables, grads)

    assert _num_programs(step) == num_programs


def _num_programs(step: Any) -> int:
    graph = tf.function(step).get_concrete_function(_gradients(0)).graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return len({node.attr["f"].func.name for node in nodes if "_XlaMustCompile" in node.attr})


@for_every_keras()
def test_sparse_gradients_have_programs_of_their_own(keras: ModuleType) -> None:
    variables, plain_variables = _variables(keras), _variables(keras)
    plain = optimizer(keras, "Adam")
    opt = _wrapped(optimizer(keras, "Adam"))
    opt.build(variables)
    plain.build(plain_variables)

    def gradients(seed: int) -> list[Any]:
        first, *others = _gradients(seed)
        return [tf.IndexedSlices(first[:1], tf.constant([seed % 2]), tf.constant([2, 3])), *others]

    step = tf.function(lambda grads: _apply(opt, variables, grads))
    for seed in range(3):
        step(gradients(seed))
        plain.apply_gradients(zip(gradients(seed), plain_variables, strict=True))
    for one, other in zip(variables, plain_variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


@for_every_keras()
def test_variables_without_gradients_are_left_alone(keras: ModuleType) -> None:
    opt, variables = _wrapped(optimizer(keras)), _variables(keras)
    before = values(variables)
    opt.build(variables)
    step = tf.function(lambda grads: _apply(opt, variables, grads))
    with pytest.warns(UserWarning, match="Gradients do not exist") if hasattr(opt, "apply") else nullcontext():
        step([None, *_gradients(0)[1:]])
    assert values(variables)[0] == before[0]
    assert all(now != former for now, former in zip(values(variables)[1:], before[1:], strict=True))


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
        variables = [variable(keras, np.zeros(shape), dtype=dtype) for shape in _SHAPES]
        opt.build(variables)
        step = tf.function(lambda grads: _apply(opt, variables, grads))
        for seed in range(3):
            rng = np.random.default_rng(seed)
            # Float32 computes exactly on these, and bfloat16 must round them.
            step([tf.constant(rng.integers(-2048, 2048, shape) / 1024, tf.float32) for shape in _SHAPES])
        return values([*variables, *inner.variables])

    assert trained(jit_compile=True) == trained(jit_compile=False)
