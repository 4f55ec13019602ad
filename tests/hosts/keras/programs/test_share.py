"""Tests of the share of an optimizer in a program: where it is split into programs that variables share."""

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, optimizer, values, variable
from many_variables import apply, assert_train_alike, gradients, make_variables, wrapped

import tfmp


@for_every_keras()
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}])
def test_programs_are_shared_in_eager_code(keras: ModuleType, options: dict[str, Any]) -> None:
    opt = wrapped(optimizer(keras, "Adam", **options))
    assert_train_alike(opt, optimizer(keras, "Adam", **options), keras, eagerly=True)
    # They are those of one setting: nothing that is noted when they are made counts as another one.
    assert len(opt._compilers.of(opt.inner_optimizer).programs) == 1


@for_every_keras("keras3")
def test_constraints_hold_for_their_variables_alone(keras: ModuleType) -> None:
    opt, variables = wrapped(optimizer(keras, learning_rate=0.0)), make_variables(keras)
    variables[2].constraint = keras.constraints.NonNeg()
    before = values(variables)
    opt.build(variables)
    tf.function(lambda: opt.apply(gradients(0), variables))()
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
    opt, variables = wrapped(optimizer(keras, "Adam", **options)), make_variables(keras)
    opt.build(variables)

    def step(grads: list[Any]) -> None:
        apply(opt, variables, grads)

    assert _num_programs(step) == num_programs


@for_every_keras()
@pytest.mark.parametrize("compiled", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("shape", [[1, 4], [4], []])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_gradient_of_another_shape_than_its_variable_does_what_it_does_without_a_wrapper(
    keras: ModuleType, name: str, shape: list[int], place: int, compiled: bool
) -> None:
    grads = [tf.fill(shape if index == place else [4, 4], index + 1.0) for index in range(4)]

    def trained(opt: Any) -> list[Any]:
        weights = [variable(keras, np.ones([4, 4])) for _ in grads]
        opt.build(weights)
        scale = opt.scale_loss(tf.constant(1.0)) if isinstance(opt, tfmp.LossScaleOptimizer) else 1.0

        def apply(grads: list[tf.Tensor]) -> None:
            opt.apply_gradients(zip([grad * scale for grad in grads], weights, strict=True))

        step = tf.function(apply) if compiled else apply
        for _ in range(3):
            step(grads)
        return values(weights)

    if name == "SGD" and keras.__version__.startswith("3."):
        # This optimizer does not broadcast.
        for opt in (optimizer(keras, name), wrapped(optimizer(keras, name))):
            with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"must be equal|Cannot update"):
                trained(opt)
    else:
        expected = trained(optimizer(keras, name))
        np.testing.assert_allclose(trained(wrapped(optimizer(keras, name))), expected, rtol=1e-6)


@for_every_keras()
@pytest.mark.parametrize(
    "clip",
    [
        lambda grads: tfmp.clip_by_value(grads, -0.5, 0.25),
        lambda grads: tfmp.clip_by_norm(grads, 0.5),
        lambda grads: tfmp.clip_by_global_norm(grads, 2.0)[0],
        lambda grads: tfmp.clip_by_value(tfmp.clip_by_norm(grads, 0.5), -0.25, 0.25),
    ],
    ids=["value", "norm", "global_norm", "norm_and_value"],
)
def test_gradients_that_tfmp_clips_are_clipped_again_in_shared_programs(keras: ModuleType, clip: Any) -> None:
    variables, plain_variables = make_variables(keras), make_variables(keras)
    opt, plain = wrapped(optimizer(keras, "Adam")), optimizer(keras, "Adam")
    opt.build(variables)
    plain.build(plain_variables)

    def step(grads: list[Any]) -> None:
        clipped = clip(opt.get_unscaled_gradients([grad * SCALE for grad in grads]))
        opt.apply_gradients(zip(clipped, variables, strict=True))

    take_step = tf.function(step)
    for seed in range(3):
        take_step(gradients(seed))
        plain.apply_gradients(zip(clip(gradients(seed)), plain_variables, strict=True))
    for one, other in zip(variables, plain_variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
    assert _num_programs(step) == 4


def _num_programs(step: Any) -> int:
    graph = tf.function(step).get_concrete_function(gradients(0)).graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return len({node.attr["f"].func.name for node in nodes if "_XlaMustCompile" in node.attr})


@for_every_keras()
def test_variables_without_gradients_are_left_alone(keras: ModuleType) -> None:
    opt, variables = wrapped(optimizer(keras)), make_variables(keras)
    before = values(variables)
    opt.build(variables)
    step = tf.function(lambda grads: apply(opt, variables, grads))
    with pytest.warns(UserWarning, match="Gradients do not exist") if hasattr(opt, "apply") else nullcontext():
        step([None, *gradients(0)[1:]])
    assert values(variables)[0] == before[0]
    assert all(now != former for now, former in zip(values(variables)[1:], before[1:], strict=True))
