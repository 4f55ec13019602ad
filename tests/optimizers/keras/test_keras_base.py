"""The wrapper in every Keras: gradients of every form, and the properties that the wrapper shows."""

import copy
import pickle
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
    optimizer,
    take_step,
    values,
    variable,
    wrap,
)

import tfmp

pytestmark = pytest.mark.essential


def _apply_scaled(opt: Any, grads: list[Any], variables: list[Any]) -> None:
    """Apply gradients as if they were those of a scaled loss."""
    opt.scale_loss(tf.constant(1.0))
    opt.apply_gradients(zip(grads, variables, strict=True))


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@for_every_keras()
def test_variable_without_gradient_does_not_change(keras: ModuleType) -> None:
    variables = kernel_and_bias(keras)
    opt = wrap(optimizer(keras, weight_decay=0.5))
    _apply_scaled(opt, [None, tf.constant([SCALE, 0])], variables)
    assert values(variables) == [[[1, 2], [3, 4]], [5 - 0.25 * 5 - 0.5, 6 - 0.25 * 6]]


@for_every_keras()
def test_gradients_that_are_all_none_are_refused(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match="every gradient is None"):
        _apply_scaled(wrap(optimizer(keras)), [None, None], kernel_and_bias(keras))


def _recording_types(keras: ModuleType, seen: list[Any]) -> Any:
    """Return an SGD optimizer that appends the type of each gradient to `seen`."""

    class Recording(keras.optimizers.SGD):
        def update_step(self, gradient: Any, *args: Any) -> None:
            seen.append(type(gradient))
            super().update_step(gradient, *args)

    return Recording(0.5)


@for_every_keras()
def test_sparse_gradients_stay_sparse(keras: ModuleType) -> None:
    seen: list[Any] = []
    table = variable(keras, np.ones([4, 1]))
    slices = tf.IndexedSlices(tf.constant([[SCALE], [2 * SCALE]]), tf.constant([1, 2]), tf.constant([4, 1]))
    opt = wrap(_recording_types(keras, seen))
    _apply_scaled(opt, [slices], [table])
    assert table.numpy().ravel().tolist() == [1, 0.5, 0, 1]
    overflowed = tf.IndexedSlices(tf.constant([[np.inf]]), tf.constant([1]), tf.constant([4, 1]))
    _apply_scaled(opt, [overflowed], [table])
    assert table.numpy().ravel().tolist() == [1, 0.5, 0, 1]
    assert int(opt.skipped_steps) == 1
    assert set(seen) == {tf.IndexedSlices}


@for_every_keras()
def test_embedding_trains_the_rows_that_were_looked_up(keras: ModuleType) -> None:
    seen: list[Any] = []
    model = keras.Sequential([keras.Input([1]), keras.layers.Embedding(4, 1, embeddings_initializer="ones")])
    model.compile(wrap(_recording_types(keras, seen)), loss=lambda target, output: output, jit_compile=False)
    model.fit(np.array([[1], [3]]), np.ones([2, 1]), verbose=0)
    assert model.get_weights()[0].ravel().tolist() == [1, 0.75, 1, 0.75]
    assert set(seen) == {tf.IndexedSlices}


@for_every_keras()
def test_float16_variable_is_unscaled_in_float32(keras: ModuleType) -> None:
    weight = variable(keras, [1, 2], dtype="float16")
    # In float16 the reciprocal of this scale is 0.
    opt = wrap(optimizer(keras), init_loss_scale=2.0**25)
    _apply_scaled(opt, [tf.constant([2.0**15, 0.0], tf.float16)], [weight])
    assert weight.numpy().tolist() == [1 - 2.0**-11, 2]


@for_every_keras()
def test_gradient_that_overflows_the_type_of_its_variable_is_skipped(keras: ModuleType) -> None:
    weight = variable(keras, [1, 2], dtype="float16")
    opt = wrap(optimizer(keras))
    _apply_scaled(opt, [tf.constant([SCALE * 2.0**16, 0.0])], [weight])
    assert weight.numpy().tolist() == [1, 2]
    assert int(opt.skipped_steps) == 1


@for_every_keras()
def test_learning_rate_is_the_inner_optimizers(keras: ModuleType) -> None:
    (weight, _) = variables = kernel_and_bias(keras)
    inner = optimizer(keras)
    opt = wrap(inner)
    opt.learning_rate = 0.25
    assert float(inner.learning_rate.numpy()) == float(opt.learning_rate.numpy()) == 0.25
    opt.learning_rate.assign(0.125)
    assert float(inner.learning_rate.numpy()) == 0.125
    take_step(opt, variables, [8 * tf.ones([2, 2]), tf.zeros([2])])
    assert weight.numpy().tolist() == [[0, 1], [2, 3]]


@for_every_keras()
def test_skipped_step_does_not_move_a_schedule(keras: ModuleType) -> None:
    variables = kernel_and_bias(keras)
    opt = wrap(
        optimizer(keras, learning_rate=keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.25, 0.125]))
    )
    rates = []
    for bad in (None, np.inf, np.nan, None, np.inf, None):
        take_step(opt, variables, gradients(0, last=bad))
        rates.append(float(np.asarray(opt.learning_rate)))
    # The property is the learning rate of the next step in Keras 3, and that of the last step in Keras 2.
    assert rates in ([0.25, 0.25, 0.25, 0.125, 0.125, 0.125], [0.5, 0.5, 0.5, 0.25, 0.25, 0.125])


@pytest.mark.parametrize("by", ["var_list", "var_names"])
@for_every_keras()
def test_variables_are_excluded_from_the_inner_optimizers_weight_decay(keras: ModuleType, by: str) -> None:
    variables = kernel_and_bias(keras)
    opt = wrap(optimizer(keras, weight_decay=0.5))
    opt.exclude_from_weight_decay(**{by: {"var_list": variables[1:], "var_names": ["bias"]}[by]})
    take_step(opt, variables, [tf.zeros([2, 2]), tf.zeros([2])])
    assert values(variables) == [[[0.75, 1.5], [2.25, 3]], [5, 6]]


@for_every_keras()
def test_iterations_are_the_inner_optimizers_and_name_is_the_given_one(keras: ModuleType) -> None:
    inner = optimizer(keras)
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(8), name="mine")
    assert opt.name == "mine"
    take_step(opt, kernel_and_bias(keras), gradients(0))
    assert opt.iterations is inner.iterations
    assert int(opt.iterations) == 1


@for_every_keras()
def test_variables_hold_the_state_then_those_of_the_inner_optimizer(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras, "Adam"))
    opt.build(kernel_and_bias(keras))
    names = [variable.name.split(":")[0] for variable in opt.variables]
    state = ["loss_scale", "good_steps", "bad_steps"]
    counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps", "last_step_applied"]
    own = len(names) - len(opt.inner_optimizer.variables)
    assert names[:own][-7:] == [*state, *counts]
    assert [id(variable) for variable in opt.variables[own:]] == [
        id(variable) for variable in opt.inner_optimizer.variables
    ]


@for_every_keras()
def test_set_weights_restores_the_values_of_another_optimizer(keras: ModuleType) -> None:
    opts = [wrap(optimizer(keras, "Adam")) for _ in range(2)]
    for seed, opt in enumerate(opts):
        variables = kernel_and_bias(keras)
        for bad in (None, np.inf, None)[seed:]:
            take_step(opt, variables, gradients(seed, last=bad))
    weights = [variable.numpy() for variable in opts[0].variables]
    assert values(opts[1].variables) != values(opts[0].variables)
    opts[1].set_weights(weights)
    assert values(opts[1].variables) == values(opts[0].variables)
    assert float(opts[1].loss_scale) == SCALE / 2


@for_every_keras()
def test_set_weights_before_build_is_refused(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras, "Adam"))
    opt.build(kernel_and_bias(keras))
    with pytest.raises(ValueError, match=r"has \d+ variables, got \d+ values: build it first"):
        wrap(optimizer(keras, "Adam")).set_weights([variable.numpy() for variable in opt.variables])


@for_every_keras()
def test_status_properties_are_scalar_tensors(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    told = (opt.loss_scale, opt.last_step_finite, opt.applied_steps, opt.skipped_steps, opt.consecutive_skipped_steps)
    assert all(isinstance(tensor, tf.Tensor) and tensor.shape == [] for tensor in told)
    assert [tensor.dtype.name for tensor in told] == ["float32", "bool", "int64", "int64", "int64"]
    assert [tensor.numpy() for tensor in told] == [SCALE, True, 0, 0, 0]


@for_every_keras()
def test_copy_shares_the_inner_optimizer_if_a_copy_of_keras_own_wrapper_does(keras: ModuleType) -> None:
    stock = keras.mixed_precision.LossScaleOptimizer(optimizer(keras))
    opt = wrap(optimizer(keras))
    copied = copy.copy(opt)
    assert type(copied) is type(opt)
    shares_inner = copied.inner_optimizer is opt.inner_optimizer
    assert shares_inner is (copy.copy(stock).inner_optimizer is stock.inner_optimizer)
    (weight,) = variables = [variable(keras, [1, 2])]
    _apply_scaled(copied, [tf.constant([SCALE, 0])], variables)
    assert weight.numpy().tolist() == [0.5, 2]
    assert int(opt.iterations) == int(opt.applied_steps) == shares_inner


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deep", "pickle"])
@for_every_keras("keras3")
def test_deep_copy_continues_from_the_state_of_the_original(keras: ModuleType, copied: Callable[[Any], Any]) -> None:
    opt = wrap(optimizer(keras))
    take_step(opt, kernel_and_bias(keras), gradients(0, last=np.inf))
    again = copied(opt)
    assert again.get_config() == opt.get_config()
    assert (float(again.loss_scale), int(again.skipped_steps)) == (SCALE / 2, 1)
    take_step(again, kernel_and_bias(keras), gradients(0, last=np.inf))
    assert (float(again.loss_scale), float(opt.loss_scale)) == (SCALE / 4, SCALE / 2)
