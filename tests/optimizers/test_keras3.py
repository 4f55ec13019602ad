"""The wrapper around Keras 3 optimizers, on one device."""

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers import LossScaleState
from tfmp.core.outcomes import StepOutcomes

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

_STATE = {*LossScaleState._fields, *StepOutcomes._fields}
_SCALE = 1024.0

# A container of optimizers, which is none itself, and the bases.
_NOT_OPTIMIZERS = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}
_OPTIMIZERS = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer) and name not in _NOT_OPTIMIZERS
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "weight_decay": {"weight_decay": 0.25},
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "accumulation": {"gradient_accumulation_steps": 2},
    "schedule": {"learning_rate": keras.optimizers.schedules.PolynomialDecay(0.5, 10)},
}


def _manager(**settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(
        **{"init_loss_scale": _SCALE, "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
        | settings
    )


def _inner(name: str = "SGD", **options: Any) -> keras.optimizers.Optimizer:
    return getattr(keras.optimizers, name)(**{"learning_rate": 0.5} | options)


def _variables() -> list[keras.Variable]:
    return [keras.Variable(np.float32([[1, 2], [3, 4]]), name="kernel"), keras.Variable([5.0, 6.0], name="bias")]


def _grads(step: int) -> list[tf.Tensor]:
    rng = np.random.default_rng(step)
    return [tf.constant(rng.integers(-8, 9, shape) / 4, tf.float32) for shape in ([2, 2], [2])]


def _values(variables: list[keras.Variable], opt: keras.optimizers.Optimizer) -> list[Any]:
    """Return the value of every variable but the loss scale's own state."""
    kept = [variable for variable in opt.variables if variable.name not in _STATE]
    return [variable.numpy().tolist() for variable in [*variables, *kept]]


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_wrapped_training_equals_training_without_wrapper(name: str, options: dict[str, Any]) -> None:
    inner, plain = _inner(name, **options), _inner(name, **options)
    wrapped = tfmp.LossScaleOptimizer(inner, _manager())
    wrapped_variables, plain_variables = _variables(), _variables()
    for step in range(4):
        wrapped.apply([grad * _SCALE for grad in _grads(step)], wrapped_variables)
        plain.apply(_grads(step), plain_variables)
    wrapped.finalize_variable_values(wrapped_variables)
    plain.finalize_variable_values(plain_variables)
    assert _values(wrapped_variables, inner) == _values(plain_variables, plain)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    "options", [_OPTIONS["plain"], _OPTIONS["accumulation"], _OPTIONS["ema"]], ids=["plain", "accumulation", "ema"]
)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_skipped_step_changes_nothing_but_the_scale(name: str, options: dict[str, Any], compiled: bool) -> None:
    variables = _variables()
    opt = tfmp.LossScaleOptimizer(_inner(name, **options), _manager())
    opt.build(variables)

    def step(grads: list[tf.Tensor]) -> None:
        opt.apply(grads, variables)

    run = tf.function(step) if compiled else step
    run(_grads(0))
    before = _values(variables, opt)
    for bad in (math.inf, -math.inf, math.nan):
        run([_grads(1)[0], tf.constant([0.0, bad])])
        assert _values(variables, opt) == before
    assert float(opt.loss_scale) == _SCALE / 8
    assert (int(opt.iterations), int(opt.applied_steps), int(opt.skipped_steps)) == (
        1 // options.get("gradient_accumulation_steps", 1),
        1,
        3,
    )
    run(_grads(1))
    assert _values(variables, opt) != before


def _model(jit_compile: bool | str = "auto", **settings: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    policy = keras.DTypePolicy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4, activation="relu", dtype=policy),
            keras.layers.Dense(1, dtype=policy),
        ]
    )
    opt = tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.125), _manager(**settings))
    model.compile(opt, "mse", jit_compile=jit_compile)
    return model


def _rows(count: int = 32) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).random((count, 3), np.float32)
    return x, x.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("jit_compile", [False, True, "auto"])
def test_fit_starts_too_high_skips_and_learns(jit_compile: bool | str) -> None:
    model = _model(jit_compile, init_loss_scale=2.0**30)
    opt = model.optimizer
    history = model.fit(*_rows(), batch_size=8, epochs=20, verbose=0).history["loss"]
    assert history[-1] < history[0] / 4
    assert int(opt.skipped_steps) > 5
    assert int(opt.applied_steps) + int(opt.skipped_steps) == 80
    assert int(opt.iterations) == int(opt.applied_steps)
    assert float(opt.loss_scale) < 2.0**25


def test_compile_under_mixed_float16_does_not_wrap_again() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        opt = tfmp.LossScaleOptimizer(_inner(), _manager())
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        model.compile(opt, "mse")
        assert model.optimizer is opt
    finally:
        keras.config.set_dtype_policy("float32")


def test_train_on_batch_takes_a_step() -> None:
    model = _model()
    model.train_on_batch(*_rows(8))
    assert int(model.optimizer.applied_steps) == 1


def test_custom_loop_with_apply_gradients() -> None:
    (variable,) = variables = [keras.Variable([1.0, 2.0])]
    opt = tfmp.LossScaleOptimizer(_inner(), _manager())
    for factor in (1.0, math.inf, 1.0):
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_sum(variable.value) * factor)
        opt.apply_gradients(zip(tape.gradient(loss, [variable.value]), variables, strict=True))
    assert variable.numpy().tolist() == [0, 1]
    assert (float(opt.loss_scale), int(opt.iterations), bool(opt.last_step_finite)) == (512, 2, True)


def test_sparse_gradients_stay_sparse() -> None:
    seen = []

    class Seeing(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            seen.append(type(gradient))
            super().update_step(gradient, variable, learning_rate)

    table = keras.Variable(np.ones([3, 1], np.float32))
    opt = tfmp.LossScaleOptimizer(Seeing(0.5), _manager())
    opt.apply([tf.IndexedSlices(tf.constant([[_SCALE]]), tf.constant([1]), tf.constant([3, 1]))], [table])
    assert table.numpy().ravel().tolist() == [1, 0.5, 1]
    assert seen == [tf.IndexedSlices]


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_variable_without_gradient_is_left_alone() -> None:
    variables = _variables()
    opt = tfmp.LossScaleOptimizer(_inner(), _manager())
    opt.apply([None, tf.constant([_SCALE, 0.0])], variables)
    assert variables[0].numpy().tolist() == [[1, 2], [3, 4]]
    assert variables[1].numpy().tolist() == [4.5, 6]


def test_variable_overwritten_by_its_gradient_gets_it_unscaled_by_nothing() -> None:
    variables = _variables()
    variables[1].overwrite_with_gradient = True
    opt = tfmp.LossScaleOptimizer(_inner(), _manager())
    opt.apply([grad * _SCALE for grad in _grads(0)[:1]] + [tf.constant([7.0, 8.0])], variables)
    assert variables[1].numpy().tolist() == [7, 8]


def test_float16_variable_is_unscaled_in_float32() -> None:
    variable = keras.Variable([1.0, 2.0], dtype="float16")
    opt = tfmp.LossScaleOptimizer(_inner(), _manager(init_loss_scale=2.0**25))
    # The reciprocal of 2**25 is 0 in float16.
    opt.apply([tf.constant([2.0**15, 0.0], tf.float16)], [variable])
    assert variable.numpy().tolist() == [1 - 2.0**-11, 2]


def test_learning_rate_and_weight_decay_exclusions_are_the_inner_optimizers() -> None:
    variables = _variables()
    inner = keras.optimizers.SGD(0.5, weight_decay=0.5)
    opt = tfmp.LossScaleOptimizer(inner, _manager())
    opt.learning_rate = 0.25
    opt.exclude_from_weight_decay(var_names=["bias"])
    opt.apply([tf.zeros([2, 2]), tf.zeros([2])], variables)
    assert float(inner.learning_rate.numpy()) == float(opt.learning_rate.numpy()) == 0.25
    assert variables[0].numpy()[0, 0] == 1 - 0.5 * 0.25
    assert variables[1].numpy().tolist() == [5, 6]


def test_empty_gradients_are_no_step_as_in_keras() -> None:
    opt = tfmp.LossScaleOptimizer(_inner(), _manager())
    opt.apply([], [])
    assert not opt.built


def test_gradients_that_are_all_none_are_refused() -> None:
    opt = tfmp.LossScaleOptimizer(_inner(), _manager())
    with pytest.raises(ValueError, match="every gradient is None"):
        opt.apply([None, None], _variables())


def test_apply_without_variables_before_build_is_refused() -> None:
    opt = tfmp.LossScaleOptimizer(_inner(), _manager())
    with pytest.raises(ValueError, match="not built yet: pass trainable_variables"):
        opt.apply(_grads(0))


def test_manager_of_another_keras_optimizer_is_refused() -> None:
    manager = _manager()
    tfmp.LossScaleOptimizer(_inner(), manager).build(_variables())
    with pytest.raises(ValueError, match="in another Keras optimizer already"):
        tfmp.LossScaleOptimizer(_inner(), manager).build(_variables())


def test_inner_optimizer_that_scales_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_scale_factor=8\.0: the loss would be scaled twice"):
        tfmp.LossScaleOptimizer(_inner(loss_scale_factor=8.0), _manager())


def test_kerass_own_wrapper_is_not_wrapped() -> None:
    with pytest.raises(ValueError, match="a LossScaleOptimizer already"):
        tfmp.LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(_inner()), _manager())


def test_stateless_apply_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="not for the TensorFlow backend"):
        tfmp.LossScaleOptimizer(_inner(), _manager()).stateless_apply([], [], [])


def test_every_public_method_of_kerass_wrapper_was_considered() -> None:
    overridden = {"apply", "build", "exclude_from_weight_decay", "from_config", "get_config", "scale_loss"}
    overridden |= {"load_own_variables"}
    refused = {"stateless_apply"}
    # What the parent, or the base class, does on the inner optimizer or on `variables`, and is right here.
    inherited = {
        *("apply_gradients", "finalize_variable_values", "iterations", "learning_rate", "variables"),
        *("save_own_variables", "set_weights", "check_finite"),
        *("add_optimizer_variables", "add_variable", "add_variable_from_reference"),
        *("assign", "assign_add", "assign_sub", "update_step"),
    }
    parent = keras.optimizers.LossScaleOptimizer
    assert {name for name in dir(parent) if not name.startswith("_")} == overridden | refused | inherited
    front_end = type(tfmp.LossScaleOptimizer(_inner(), _manager()))
    assert all(getattr(front_end, name) is not getattr(parent, name) for name in overridden | refused)
