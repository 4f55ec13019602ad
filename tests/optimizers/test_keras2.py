"""Behavior that only the front-ends for Keras 2 have: that of Keras 2.15 and that of tf_keras."""

import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    for_every_keras,
    gradients,
    kernel_and_bias,
    linear_model,
    optimizer,
    state,
    take_step,
    values,
    variable,
    wrap,
)

import tfmp

pytestmark = pytest.mark.essential

for_every_keras2 = for_every_keras("keras2", "tf_keras")


def _manager() -> tfmp.LossScaleManager:
    """Return a manager with the rule of Keras' own wrapper."""
    return tfmp.ExponentialUpdateLossScaleManager(SCALE, 4, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def _adam(keras: ModuleType) -> Any:
    return optimizer(keras, "Adam", learning_rate=keras.optimizers.schedules.PolynomialDecay(0.5, 50))


def _unscaling_step(opt: Any, variables: list[tf.Variable], grads: list[tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable * grad) for variable, grad in zip(variables, grads, strict=True)])
        scaled = opt.get_scaled_loss(loss)
    grads = opt.get_unscaled_gradients(tape.gradient(scaled, variables))
    opt.apply_gradients(zip(grads, variables, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@for_every_keras2
def test_counting_skipped_steps_trains_step_for_step_as_keras_own_wrapper(keras: ModuleType, compiled: bool) -> None:
    own = keras.mixed_precision.LossScaleOptimizer(_adam(keras), initial_scale=SCALE, dynamic_growth_steps=4)
    ours = tfmp.LossScaleOptimizer(_adam(keras), _manager(), iterations_include_skipped_steps=True)
    runs = []
    for opt in (own, ours):
        variables = kernel_and_bias(keras)

        def step(*grads: tf.Tensor, opt: Any = opt, variables: list[tf.Variable] = variables) -> None:
            _unscaling_step(opt, variables, list(grads))

        runs.append((opt, variables, tf.function(step) if compiled else step))
    rng = np.random.default_rng(0)
    for seed in range(60):
        last = rng.choice([math.inf, math.nan]) if rng.random() < 0.2 else None
        told = []
        for opt, variables, run in runs:
            run(*gradients(seed, last))
            inner = [*variables, *opt.inner_optimizer.variables, opt.learning_rate]
            told.append([*values(inner), int(opt.iterations), float(opt.loss_scale)])
        assert told[0] == told[1]
    assert state(ours, "good_steps") == [int(own.dynamic_counter)]
    assert int(ours.iterations) == 60
    assert 5 < int(ours.skipped_steps) < 30


@for_every_keras2
def test_skipped_steps_do_not_count_by_default(keras: ModuleType) -> None:
    variables = kernel_and_bias(keras)
    opt = wrap(_adam(keras))
    for last in (None, math.inf, math.nan, None, -math.inf):
        take_step(opt, variables, gradients(0, last))
    assert (int(opt.iterations), int(opt.skipped_steps)) == (2, 3)


@for_every_keras2
def test_every_public_name_of_keras_own_wrapper_is_overridden_refused_or_inherited(keras: ModuleType) -> None:
    overridden = {
        *("aggregate_gradients", "apply_gradients", "build", "compute_gradients", "ema_momentum"),
        *("exclude_from_weight_decay", "finalize_variable_values", "from_config", "get_config", "get_scaled_loss"),
        *("get_unscaled_gradients", "inner_optimizer", "iterations", "learning_rate", "loss_scale", "set_weights"),
        *("load_own_variables", "minimize", "save_own_variables", "use_ema", "variables"),
    }
    overridden |= {"dynamic", "dynamic_growth_steps", "initial_scale"}
    refused = {"dynamic_counter"}
    # The base class implements these by the names above, or by `variables`.
    inherited = {"lr"}
    # These are for authors of optimizers. They make or update variables of the wrapper itself.
    inherited |= {"add_variable", "add_variable_from_reference", "update_step"}

    interface = keras.mixed_precision.LossScaleOptimizer
    made = interface(optimizer(keras))
    assert {name for name in dir(interface) if not name.startswith("_")} <= overridden | refused
    assert {name for name in dir(made) if not name.startswith("_")} == overridden | refused | inherited
    ours = wrap(optimizer(keras))
    assert isinstance(ours, interface)
    base = keras.optimizers.Optimizer
    for name in overridden:
        assert getattr(type(ours), name) not in (getattr(base, name, None), getattr(interface, name, None)), name
    for name in refused:
        with pytest.raises(AttributeError, match="the state of the loss-scale manager"):
            getattr(ours, name)
    for name in inherited:
        assert getattr(type(ours), name) is getattr(base, name), name


@for_every_keras2
def test_saved_configuration_names_the_class_where_keras_finds_it_without_tfmp(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    saved = keras.saving.serialize_keras_object(opt)
    assert getattr(importlib.import_module(saved["module"]), saved["class_name"]) is type(opt)


@for_every_keras2
def test_lr_is_the_learning_rate(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    opt.lr = 0.25
    assert opt.lr is opt.inner_optimizer.learning_rate
    assert float(opt.lr) == 0.25


@for_every_keras2
def test_iterations_can_be_another_variable(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    opt.iterations = tf.Variable(5, dtype=tf.int64)
    take_step(opt, kernel_and_bias(keras), gradients(0))
    assert int(opt.inner_optimizer.iterations) == int(opt.iterations) == 6


@for_every_keras2
def test_settings_of_moving_averages_are_those_of_the_inner_optimizer(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras, use_ema=True, ema_momentum=0.5))
    assert (opt.use_ema, opt.ema_momentum) == (True, 0.5)
    opt.use_ema, opt.ema_momentum = False, 0.25
    assert (opt.inner_optimizer.use_ema, opt.inner_optimizer.ema_momentum) == (False, 0.25)


@pytest.mark.parametrize(
    ("arguments", "aggregates"),
    [
        ({}, True),
        ({"skip_gradients_aggregation": True}, False),
        ({"experimental_aggregate_gradients": False}, False),
    ],
    ids=str,
)
@for_every_keras2
def test_gradients_are_aggregated_once_unless_aggregation_is_skipped(
    keras: ModuleType, arguments: dict[str, bool], aggregates: bool
) -> None:
    calls = []

    class Noting(keras.optimizers.SGD):
        def aggregate_gradients(self, grads_and_vars: Any) -> Any:
            calls.append(1)
            return super().aggregate_gradients(grads_and_vars)

    weight = variable(keras, [1, 2])
    opt = wrap(Noting(0.5))
    opt.scale_loss(tf.constant(1.0))
    iterations = opt.apply_gradients([(tf.constant([SCALE, 0]), weight)], **arguments)
    assert weight.numpy().tolist() == [0.5, 2]
    assert (len(calls), iterations is opt.iterations) == (aggregates, True)
    assert opt.aggregate_gradients([(tf.constant(1.0), weight)])[0][1] is weight


@for_every_keras2
def test_empty_list_of_gradients_takes_no_step_as_in_keras(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    assert opt.apply_gradients([]) is opt.iterations
    assert opt.compute_gradients(lambda: tf.constant(1.0), []) == []
    assert int(opt.applied_steps) == 0


@for_every_keras2
def test_variables_may_be_given_by_a_function(keras: ModuleType) -> None:
    weight = variable(keras, [1, 2])
    opt = wrap(optimizer(keras))
    opt.minimize(lambda: tf.reduce_sum(weight), lambda: [weight])
    assert weight.numpy().tolist() == [0.5, 1.5]


@for_every_keras2
def test_name_of_the_call_is_the_scope_of_the_inner_optimizers_ops(keras: ModuleType) -> None:
    weight = variable(keras, [1, 2])
    opt = wrap(optimizer(keras))

    @tf.function
    def step() -> None:
        opt.scale_loss(tf.constant(1.0))
        opt.apply_gradients([(tf.constant([SCALE, 0]), weight)], name="mine")

    graph = step.get_concrete_function().graph.as_graph_def()
    assert any("mine" in node.name for function in graph.library.function for node in function.node_def)


@for_every_keras("keras2")
def test_optimizers_of_the_attribute_tf_dot_keras_are_those_of_keras(keras: ModuleType) -> None:
    model = linear_model(tf.keras, wrap(tf.keras.optimizers.SGD(0.5)))
    model.train_on_batch(np.ones([1, 1]), np.ones([1, 1]))
    assert values(model.weights) == [[[-0.5]]]
    assert isinstance(model.optimizer, keras.optimizers.Optimizer)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@for_every_keras2
def test_wrapped_nadam_trains_as_without_wrapper_and_keras_own_wrapper_does_not(
    keras: ModuleType, in_function: bool
) -> None:
    """Nadam of Keras 2 counts steps in Python while a function is traced.

    Inside a function it therefore takes other steps than in eager code, with or without a wrapper.
    """

    def trained(wrapped: Callable[[Any], Any], factors: list[float], in_function: bool) -> list[Any]:
        variables, opt = kernel_and_bias(keras), wrapped(optimizer(keras, "Nadam"))
        opt.build(variables)

        def step(factor: tf.Tensor) -> None:
            grads = [grad * factor for grad in gradients(0)]
            if hasattr(opt, "get_scaled_loss"):
                _unscaling_step(opt, variables, grads)
            else:
                opt.apply_gradients(zip(grads, variables, strict=True))

        step = tf.function(step) if in_function else step
        for factor in factors:
            step(tf.constant(factor))
        return values(variables)

    finite, skipping = [1.0, 3.0, -2.0], [1.0, math.inf, 3.0, -2.0]
    bare = trained(lambda inner: inner, finite, in_function)
    ours = trained(wrap, skipping, in_function)
    stock = trained(keras.mixed_precision.LossScaleOptimizer, skipping, in_function)
    np.testing.assert_allclose(np.concatenate(ours, axis=None), np.concatenate(bare, axis=None), rtol=1e-6)
    assert not np.allclose(np.concatenate(stock, axis=None), np.concatenate(bare, axis=None), rtol=1e-3)
    # The documentation of the limits describes this difference. If the assertion fails, the page must change.
    eager = trained(lambda inner: inner, finite, in_function=False)
    assert np.allclose(np.concatenate(bare, axis=None), np.concatenate(eager, axis=None), rtol=1e-3) != in_function
