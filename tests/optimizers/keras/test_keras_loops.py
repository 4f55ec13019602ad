"""Custom training loops in every Keras: all ways of writing them train alike."""

import contextlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    fit_linear,
    for_every_keras,
    kernel_and_bias,
    linear_model,
    optimizer,
    take_step,
    values,
    variable,
    wrap,
)

pytestmark = pytest.mark.essential

# A function that takes one step, given the optimizer, the variables and a function that returns the loss.
_Way: TypeAlias = Callable[[Any, list[Any], Callable[[], tf.Tensor]], None]


def _scale_loss(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        scaled = opt.scale_loss(loss_fn())
    opt.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))


def _get_scaled_loss(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        scaled = opt.get_scaled_loss(loss_fn())
    grads = opt.get_unscaled_gradients(tape.gradient(scaled, variables))
    # This limit is far above all finite norms here, so clipping changes nothing.
    grads, _ = tf.clip_by_global_norm(grads, 2.0**20)
    opt.apply_gradients(zip(grads, variables, strict=True))


def _get_scaled_loss_of_function(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        scaled = opt.get_scaled_loss(loss_fn)()
    grads = opt.get_unscaled_gradients(tape.gradient(scaled, variables))
    opt.apply_gradients(zip(grads, variables, strict=True))


def _scale_loss_and_unscale(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        scaled = opt.scale_loss(loss_fn())
    grads = opt.get_unscaled_gradients(tape.gradient(scaled, variables))
    opt.apply_gradients(zip(grads, variables, strict=True))


def _minimize_function(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    opt.minimize(loss_fn, variables)


def _minimize_tensor(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        loss = loss_fn()
    opt.minimize(loss, variables, tape=tape)


def _compute_gradients(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    opt.apply_gradients(opt.compute_gradients(loss_fn, variables))


def _apply(opt: Any, variables: list[Any], loss_fn: Callable[[], tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        scaled = opt.scale_loss(loss_fn())
    opt.apply(tape.gradient(scaled, variables), variables)


def _check(keras: ModuleType, way: _Way, compiled: bool) -> None:
    """Check that a loop trains as without a wrapper on the inputs that do not overflow."""
    inner, plain = optimizer(keras, "Adam"), optimizer(keras, "Adam")
    opt = wrap(inner)
    wrapped_variables, plain_variables = kernel_and_bias(keras), kernel_and_bias(keras)

    def step(factor: tf.Tensor) -> None:
        kernel, bias = wrapped_variables
        way(opt, wrapped_variables, lambda: factor * tf.reduce_sum(kernel * kernel) + tf.reduce_sum(factor * bias))

    run = tf.function(step) if compiled else step
    for factor in (1.0, math.inf, 0.5, -math.inf, math.nan, -2.0):
        run(tf.constant(factor))
        if math.isfinite(factor):
            kernel, bias = plain_variables
            take_step(plain, plain_variables, [2 * factor * kernel, factor * tf.ones_like(bias)])
        assert values([*wrapped_variables, *inner.variables]) == values([*plain_variables, *plain.variables])
    assert (float(opt.loss_scale), int(opt.iterations), int(opt.skipped_steps)) == (SCALE / 8, 3, 3)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    "way",
    [
        _scale_loss,
        _get_scaled_loss,
        _get_scaled_loss_of_function,
        _scale_loss_and_unscale,
        _minimize_function,
        _minimize_tensor,
    ],
)
@for_every_keras()
def test_every_way_of_writing_a_loop_trains_alike(
    keras: ModuleType, way: _Way, compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _check(keras, way, compiled)
    assert not [record for record in caplog.records if record.name == "tfmp"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@for_every_keras("keras3")
def test_apply_trains_alike(keras: ModuleType, compiled: bool) -> None:
    _check(keras, _apply, compiled)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@for_every_keras("keras2", "tf_keras")
def test_compute_gradients_trains_alike(keras: ModuleType, compiled: bool) -> None:
    _check(keras, _compute_gradients, compiled)


@for_every_keras()
def test_clipping_between_unscaling_and_applying_sees_true_magnitudes(keras: ModuleType) -> None:
    weight = variable(keras, [1, 2, 3, 4])
    opt = wrap(optimizer(keras))
    with tf.GradientTape() as tape:
        scaled = opt.get_scaled_loss(tf.reduce_sum(weight * 2.0))
    grads, norm = tf.clip_by_global_norm(opt.get_unscaled_gradients(tape.gradient(scaled, [weight])), 1.0)
    opt.apply_gradients(zip(grads, [weight], strict=True))
    assert float(norm) == 4
    assert weight.numpy().tolist() == [0.75, 1.75, 2.75, 3.75]


def _linear(keras: ModuleType) -> tuple[Any, list[Any]]:
    """Return an optimizer and two weights, whose gradients are 1 and 3."""
    weights = [variable(keras, 1.0), variable(keras, 2.0)]
    opt = wrap(optimizer(keras))
    opt.build(weights)
    return opt, weights


def _scaled_gradients(opt: Any, weights: list[Any], style: str) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = getattr(opt, style)(weights[0] * 1.0 + weights[1] * 3.0)
    return list(tape.gradient(loss, weights))


def _run(step: Callable[[], None], compiled: bool, times: int = 1) -> None:
    run = tf.function(step) if compiled else step
    for _ in range(times):
        run()


_IN_BOTH_MODES = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


@_IN_BOTH_MODES
@pytest.mark.parametrize("style", ["scale_loss", "get_scaled_loss"])
@for_every_keras()
def test_gradients_whose_unscaled_values_are_thrown_away_are_unscaled_or_refused(
    keras: ModuleType, style: str, compiled: bool
) -> None:
    opt, weights = _linear(keras)

    def step() -> None:
        grads = _scaled_gradients(opt, weights, style)
        opt.get_unscaled_gradients(grads)
        opt.apply_gradients(zip(grads, weights, strict=True))

    if style == "get_scaled_loss" and keras.__version__.startswith("2."):
        with pytest.raises(RuntimeError, match=r"apply_gradients got gradients that were passed to get_unscaled_grad"):
            _run(step, compiled)
        assert values(weights) == [1, 2]
    else:
        _run(step, compiled, times=2)
        assert values(weights) == [0, -1]


@pytest.mark.parametrize("make", [tf.Variable, np.array], ids=["variable", "array"])
@for_every_keras()
def test_sparse_gradients_whose_rows_are_a_variable_or_an_array_are_not_guessed_to_be_unscaled(
    keras: ModuleType, make: Callable[[list[float]], Any]
) -> None:
    table, opt = variable(keras, [1, 1]), wrap(optimizer(keras))
    opt.build([table])
    opt.get_scaled_loss(tf.constant(1.0))
    grad = tf.IndexedSlices(make([SCALE]), tf.constant([1]), tf.constant([2]))
    opt.get_unscaled_gradients([grad])
    with pytest.raises(RuntimeError, match=r"a gradient is a \w+ that was also passed to be unscaled"):
        opt.apply_gradients([(grad, table)])
    assert values([table]) == [[1, 1]]


@pytest.mark.parametrize("style", ["scale_loss", "get_scaled_loss"])
@for_every_keras()
def test_clipping_the_argument_of_get_unscaled_gradients_is_refused_in_a_function(
    keras: ModuleType, style: str
) -> None:
    opt, weights = _linear(keras)

    def step() -> None:
        grads = _scaled_gradients(opt, weights, style)
        opt.get_unscaled_gradients(grads)
        clipped, _ = tf.clip_by_global_norm(grads, 1.0)
        opt.apply_gradients(zip(clipped, weights, strict=True))

    with pytest.raises(RuntimeError, match=r"apply_gradients got .* clip what get_unscaled_gradients returned"):
        _run(step, compiled=True)
    assert values(weights) == [1, 2]


@_IN_BOTH_MODES
@pytest.mark.parametrize("other", ["part", "penalty"])
@pytest.mark.parametrize("style", ["scale_loss", "get_scaled_loss"])
@for_every_keras()
def test_gradients_that_are_not_unscaled_with_the_others_are_refused(
    keras: ModuleType, style: str, other: str, compiled: bool
) -> None:
    opt, weights = _linear(keras)

    def step() -> None:
        first, second = _scaled_gradients(opt, weights, style)
        if other == "penalty":
            with tf.GradientTape() as tape:
                penalty = weights[1] * weights[1]
            second = tape.gradient(penalty, weights[1])
        clipped, _ = tf.clip_by_global_norm(opt.get_unscaled_gradients([first]), 0.5)
        opt.apply_gradients(zip([*clipped, second], weights, strict=True))

    with pytest.raises(
        RuntimeError, match=r"apply_gradients got gradients \(1 of 2\) that were computed after the loss was scaled"
    ):
        _run(step, compiled)
    assert values(weights) == [1, 2]


@_IN_BOTH_MODES
@pytest.mark.parametrize("before", ["failed", "only looked at"])
@for_every_keras()
def test_part_that_is_not_unscaled_is_refused_after_gradients_that_were_unscaled_without_a_step(
    keras: ModuleType, before: str, compiled: bool
) -> None:
    opt, weights = _linear(keras)

    def failing() -> None:
        opt.get_unscaled_gradients(_scaled_gradients(opt, weights, "get_scaled_loss"))
        if before == "failed":
            raise ValueError(before)

    def step() -> None:
        grads = _scaled_gradients(opt, weights, "get_scaled_loss")
        clipped, _ = tf.clip_by_global_norm(opt.get_unscaled_gradients(grads[:1]), 0.5)
        opt.apply_gradients(zip([*clipped, *grads[1:]], weights, strict=True))

    with pytest.raises(ValueError, match=before) if before == "failed" else contextlib.nullcontext():
        _run(failing, compiled)
    with pytest.raises(RuntimeError, match=r"apply_gradients got .* that were computed after the loss was scaled"):
        _run(step, compiled)
    assert values(weights) == [1, 2]


@for_every_keras()
def test_gradients_that_were_unscaled_are_not_unscaled_again(keras: ModuleType) -> None:
    opt, weights = _linear(keras)
    unscaled = opt.get_unscaled_gradients(_scaled_gradients(opt, weights, "get_scaled_loss"))
    with pytest.raises(RuntimeError, match=r"got gradients that it returned: they would be divided .* twice"):
        opt.get_unscaled_gradients(unscaled)


@pytest.mark.parametrize("style", ["get_scaled_loss", "scale_loss"])
@for_every_keras()
def test_other_half_of_the_gradients_is_not_applied_as_it_is(keras: ModuleType, style: str) -> None:
    opt, weights = _linear(keras)
    grads = _scaled_gradients(opt, weights, style)
    opt.apply_gradients([(opt.get_unscaled_gradients(grads[:1])[0], weights[0])])
    with pytest.raises(RuntimeError, match=r"apply_gradients got .* that were computed after the loss was scaled"):
        opt.apply_gradients([(grads[1], weights[1])])
    assert values(weights)[1] == 2


@for_every_keras()
def test_gradients_in_true_magnitude_of_another_loss_are_applied_as_they_are(keras: ModuleType) -> None:
    opt, weights = _linear(keras)
    zero = tf.constant(0.0)
    for other in (lambda: tf.constant(2.0), lambda: zero):
        (first,) = opt.get_unscaled_gradients(_scaled_gradients(opt, weights, "get_scaled_loss")[:1])
        opt.apply_gradients(zip([first, other()], weights, strict=True))
    assert values(weights) == [0, 1]


@for_every_keras()
def test_sums_of_unscaled_gradients_are_applied_as_they_are(keras: ModuleType) -> None:
    opt, weights = _linear(keras)
    for _ in range(2):
        sums = [tf.constant(0.0), tf.constant(0.0)]
        for _ in range(3):
            grads = opt.get_unscaled_gradients(_scaled_gradients(opt, weights, "get_scaled_loss"))
            sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
        opt.apply_gradients(zip(sums, weights, strict=True))
    assert values(weights) == [-2, -7]


@for_every_keras("keras3")
def test_gradients_that_were_to_be_unscaled_before_the_last_step_are_refused(keras: ModuleType) -> None:
    opt, weights = _linear(keras)
    grads = _scaled_gradients(opt, weights, "get_scaled_loss")
    opt.get_unscaled_gradients(grads)
    opt.apply_gradients([(grads[0], weights[0])])
    with pytest.raises(RuntimeError, match=r"apply_gradients got gradients that were passed to get_unscaled_gradients"):
        opt.apply_gradients([(grads[1], weights[1])])
    assert values(weights) == [0.5, 2]


@for_every_keras()
def test_replicas_that_throw_unscaled_values_away_train_alike(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        opt, weights = _linear(keras)

    def step() -> None:
        grads = _scaled_gradients(opt, weights, "scale_loss")
        opt.get_unscaled_gradients(grads)
        # Another replica runs meanwhile.
        tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
        opt.apply_gradients(zip(grads, weights, strict=True))

    run = tf.function(lambda: two_replicas.run(step))
    for _ in range(2):
        run()
    assert values(weights) == [-1, -4]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfmp"]


@for_every_keras()
def test_gradients_that_were_not_unscaled_are_applied_with_a_warning(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    weight = variable(keras, [1, 2])
    opt = wrap(optimizer(keras))
    opt.get_scaled_loss(tf.constant(1.0))
    opt.apply_gradients([(tf.constant([SCALE, 0]), weight)])
    (warning,) = _warnings(caplog)
    assert "applied as they are, and get_unscaled_gradients was not called before" in warning
    assert weight.numpy().tolist() == [1 - 0.5 * SCALE, 2]


@for_every_keras("keras2", "tf_keras")
def test_gradients_of_a_loss_that_was_not_scaled_are_applied_with_a_warning(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    weight = variable(keras, [1, 2])
    opt = wrap(optimizer(keras))
    opt.apply_gradients([(tf.constant([1.0, 0.0]), weight)])
    (warning,) = _warnings(caplog)
    assert "applied as they are, and get_scaled_loss was not called before" in warning
    assert weight.numpy().tolist() == [0.5, 2]


@for_every_keras("keras3")
def test_gradients_are_unscaled_with_a_warning_if_no_method_was_called_before(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    weight = variable(keras, [1, 2])
    opt = wrap(optimizer(keras))
    for _ in range(2):
        opt.apply_gradients([(tf.constant([SCALE, 0]), weight)])
    assert weight.numpy().tolist() == [0, 2]
    (warning,) = _warnings(caplog)
    assert "divided by the loss scale, and scale_loss was not called before" in warning


@for_every_keras()
@pytest.mark.parametrize("compiled", [False, True])
def test_warning_names_the_line_and_is_given_once(
    keras: ModuleType, caplog: pytest.LogCaptureFixture, compiled: bool
) -> None:
    weight = variable(keras, [1, 2])
    opt = wrap(optimizer(keras))
    opt.build([weight])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * 2.0)
        grads = tape.gradient(loss, [weight])  # the line, where there is a graph
        opt.apply_gradients(zip(grads, [weight], strict=True))  # the line, in eager code

    take = tf.function(step) if compiled else step
    for _ in range(2):
        take()
    first = step.__code__.co_firstlineno
    (warning,) = _warnings(caplog)
    assert warning.startswith(f"test_keras_loops.py:{first + (3 if compiled else 4)}: ")


@for_every_keras()
def test_fit_never_warns(keras: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    fit_linear(linear_model(keras, wrap(optimizer(keras))), [1, 1])
    assert not _warnings(caplog)


@for_every_keras()
def test_unscaling_gradients_of_a_loss_that_was_not_scaled_warns(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    wrap(optimizer(keras)).get_unscaled_gradients([tf.constant([1.0])])
    (warning,) = _warnings(caplog)
    assert "the loss was not scaled before" in warning


@for_every_keras()
def test_fit_and_both_kinds_of_loop_can_alternate(keras: ModuleType) -> None:
    model = linear_model(keras, wrap(optimizer(keras)))
    for step, way in enumerate([None, _scale_loss, None, _get_scaled_loss, None, _scale_loss, _get_scaled_loss, None]):
        if way is None:
            fit_linear(model, [1])
        else:
            way(model.optimizer, model.trainable_variables, lambda: tf.reduce_sum(model(tf.ones([1, 1]))))
        assert values(model.weights) == [[[-0.5 * (step + 1)]]]
