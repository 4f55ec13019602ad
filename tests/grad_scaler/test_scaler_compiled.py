"""Steps of a `GradScaler` whose update XLA compiles: with unscaling and clipping, and of several optimizers."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, gradients, kernel_and_bias, optimizer, values, variable

import tfmp
from tfmp.types import Gradients

pytestmark = pytest.mark.essential

_CLIPS: dict[str, Callable[[Gradients], Gradients]] = {
    "global_norm": lambda grads: tfmp.clip_by_global_norm(grads, 1.5)[0],
    "norm": lambda grads: tfmp.clip_by_norm(grads, 1.5),
    "value": lambda grads: tfmp.clip_by_value(grads, -0.5, 0.5),
    "own": lambda grads: [2 * grad for grad in grads],
    "unscaled": lambda grads: grads,
    "twice": lambda grads: tfmp.clip_by_value(tfmp.clip_by_global_norm(grads, 1.5)[0], -0.5, 0.5),
}
_MODES: dict[str, Callable[..., Any]] = {"function": tf.function, "eager": lambda step: step}


@for_every_keras()
@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize(
    ("name", "clip"), [*(("SGD", clip) for clip in [None, *_CLIPS]), ("Adam", None), ("Adam", "global_norm")]
)
@pytest.mark.essential("SGD")
def test_compiled_steps_train_as_the_bare_optimizer(keras: ModuleType, name: str, clip: str | None, mode: str) -> None:
    opt, plain, scaler = optimizer(keras, name), optimizer(keras, name), tfmp.GradScaler(8.0, jit_compile=True)
    variables, plain_variables = kernel_and_bias(keras), kernel_and_bias(keras)
    scaler.prepare(opt, variables)
    clipped = _CLIPS.get(clip or "unscaled")

    @_MODES[mode]
    def step(grads: Gradients) -> None:
        scaled = [grad * scaler.scale(tf.constant(1.0)) for grad in grads]
        if clip is not None:
            scaled = clipped(scaler.unscale(opt, scaled))
        scaler.step(opt, list(zip(scaled, variables, strict=True)))
        scaler.update()

    for seed, last in enumerate([None, math.inf, None, math.nan, None]):
        before = values(variables)
        step(gradients(seed, last))
        if last is not None:
            assert values(variables) == before
            continue
        plain.apply_gradients(list(zip(clipped(gradients(seed)), plain_variables, strict=True)))
        for one, other in zip(variables, plain_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
    (report,) = scaler.overflow_reports()
    assert report.steps.numpy().tolist() == [0, 2]
    assert float(scaler.loss_scale) == 2


@for_every_keras()
@pytest.mark.parametrize("mode", _MODES)
def test_clipping_by_nan_skips_the_step(keras: ModuleType, mode: str) -> None:
    opt, scaler, variables = optimizer(keras), tfmp.GradScaler(8.0, jit_compile=True), kernel_and_bias(keras)
    scaler.prepare(opt, variables)
    before = values(variables)

    @_MODES[mode]
    def step(clip_norm: tf.Tensor) -> None:
        grads, _ = tfmp.clip_by_global_norm(scaler.unscale(opt, gradients(0)), clip_norm)
        scaler.step(opt, list(zip(grads, variables, strict=True)))
        scaler.update()

    scaler.scale(tf.constant(1.0))
    step(tf.constant(float("nan")))
    assert values(variables) == before
    assert float(scaler.loss_scale) == 4


@for_every_keras()
@pytest.mark.parametrize("mode", _MODES)
def test_optimizers_that_step_together_each_get_their_gradients(keras: ModuleType, mode: str) -> None:
    one, other = optimizer(keras, "SGD", global_clipnorm=0.5), optimizer(keras, "Adam")
    scaler, (kernel, bias) = tfmp.GradScaler(8.0, jit_compile=True), kernel_and_bias(keras)
    plain, plain_other = optimizer(keras, "SGD", global_clipnorm=0.5), optimizer(keras, "Adam")
    plain_kernel, plain_bias = kernel_and_bias(keras)
    for opt, weight in [(one, kernel), (other, bias)]:
        scaler.prepare(opt, [weight])
    scaler.scale(tf.constant(1.0))

    @_MODES[mode]
    def step(of_kernel: tf.Tensor, of_bias: tf.Tensor) -> None:
        scaler.step_all([(one, [(of_kernel, kernel)]), (other, [(of_bias, bias)])])
        scaler.update()

    for seed in range(3):
        of_kernel, of_bias = gradients(seed)
        step(of_kernel * 8, of_bias * 8)
        plain.apply_gradients([(of_kernel, plain_kernel)])
        plain_other.apply_gradients([(of_bias, plain_bias)])
    for found, expected in [(kernel, plain_kernel), (bias, plain_bias)]:
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def _programs(function: Callable[..., None], *args: Any) -> int:
    """Return how many programs the graph of a function has that XLA compiles."""
    graph = tf.function(function).get_concrete_function(*args).graph.as_graph_def()
    return sum("_XlaMustCompile" in node.attr for each in graph.library.function for node in each.node_def)


def _large(keras: ModuleType) -> Any:
    return variable(keras, np.ones([1024, 1024]))


@for_every_keras()
def test_optimizers_that_step_together_are_one_program(keras: ModuleType) -> None:
    one, other, scaler = optimizer(keras), optimizer(keras), tfmp.GradScaler(8.0)
    kernel, second = _large(keras), _large(keras)
    for opt, weight in [(one, kernel), (other, second)]:
        scaler.prepare(opt, [weight])
    grad = tf.ones([1024, 1024])

    def together() -> None:
        scaler.step_all([(one, [(grad, kernel)]), (other, [(grad, second)])])
        scaler.update()

    def apart() -> None:
        scaler.step(one, [(grad, kernel)])
        scaler.step(other, [(grad, second)])
        scaler.update()

    assert (_programs(together), _programs(apart)) == (1, 2)


@for_every_keras()
@pytest.mark.parametrize("clip", [None, *_CLIPS])
def test_replicas_train_as_the_bare_optimizer_without_compiling(
    keras: ModuleType, clip: str | None, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    scaler, clipped = tfmp.GradScaler(8.0, jit_compile=True), _CLIPS.get(clip or "unscaled")
    with two_replicas.scope():
        opt, plain = optimizer(keras, "Adam"), optimizer(keras, "Adam")
        variables, plain_variables = kernel_and_bias(keras), kernel_and_bias(keras)
        scaler.prepare(opt, variables)

    def step(grads: Gradients) -> None:
        def on_replica() -> None:
            scaled = [grad * scaler.scale(tf.constant(1.0)) for grad in grads]
            if clip is not None:
                scaled = clipped(scaler.unscale(opt, scaled))
            scaler.step(opt, list(zip(scaled, variables, strict=True)))
            scaler.update()

        two_replicas.run(on_replica)

    function = tf.function(step)
    for seed, last in enumerate([None, math.inf, None]):
        function(gradients(seed, last))
        if last is None:
            pairs = list(zip(clipped(gradients(seed)), plain_variables, strict=True))
            two_replicas.run(lambda pairs=pairs: plain.apply_gradients(pairs))
    for one, other in zip(variables, plain_variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)
    assert _programs(step, gradients(0)) == 0


@for_every_keras()
def test_large_variables_are_compiled_unless_turned_off_or_by_code_of_a_user(keras: ModuleType) -> None:
    class Own(keras.optimizers.SGD):  # type: ignore[name-defined, misc] # one of two packages
        pass

    def programs(opt: Any, **settings: Any) -> int:
        scaler, kernel = tfmp.GradScaler(8.0, **settings), _large(keras)
        scaler.prepare(opt, [kernel])

        def step() -> None:
            scaler.step(opt, [(tf.ones([1024, 1024]), kernel)])
            scaler.update()

        return _programs(step)

    assert programs(optimizer(keras)) == 1
    assert programs(optimizer(keras), jit_compile=False) == 0
    assert programs(Own(0.5)) == 0


def test_unknown_jit_compile_is_refused() -> None:
    with pytest.raises(ValueError, match=r'jit_compile must be True, False or "auto", got'):
        tfmp.GradScaler(jit_compile="always")
