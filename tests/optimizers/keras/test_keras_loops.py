"""Custom training loops in every Keras: all ways of writing them train alike; wrong ones are refused or warned of."""

import contextlib
import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import kerases
import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, kernel_and_bias, kinds, optimizer, values, variable, variables_of, wrap

_in_both_modes = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
_in_both_styles = pytest.mark.parametrize("style", ["scale_loss", "get_scaled_loss"])

# A function that takes one step, given the optimizer, the variables and a function that returns the loss.
_Way: TypeAlias = Callable[[Any, list[Any], Callable[[], tf.Tensor]], None]


def _gradients(loss: Callable[[], tf.Tensor], variables: list[Any]) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        value = loss()
    return list(tape.gradient(value, variables))


def _step(opt: Any, variables: list[Any], grads: Any) -> None:
    opt.apply_gradients(zip(grads, variables, strict=True))


def _scale_loss(opt: Any, variables: list[Any], loss: Callable[[], tf.Tensor]) -> None:
    _step(opt, variables, _gradients(lambda: opt.scale_loss(loss()), variables))


def _get_scaled_loss(opt: Any, variables: list[Any], loss: Callable[[], tf.Tensor]) -> None:
    grads = opt.get_unscaled_gradients(_gradients(lambda: opt.get_scaled_loss(loss()), variables))
    # This limit is far above all finite norms here, so clipping changes nothing.
    _step(opt, variables, tf.clip_by_global_norm(grads, 2.0**20)[0])


def _minimize_tensor(opt: Any, variables: list[Any], loss: Callable[[], tf.Tensor]) -> None:
    with tf.GradientTape() as tape:
        value = loss()
    opt.minimize(value, variables, tape=tape)


_WAYS: dict[str, _Way] = {
    "scale_loss": _scale_loss,
    "get_scaled_loss": _get_scaled_loss,
    "get_scaled_loss of a function": lambda opt, variables, loss: _step(
        opt, variables, opt.get_unscaled_gradients(_gradients(opt.get_scaled_loss(loss), variables))
    ),
    "scale_loss and unscale": lambda opt, variables, loss: _step(
        opt, variables, opt.get_unscaled_gradients(_gradients(lambda: opt.scale_loss(loss()), variables))
    ),
    "minimize a function": lambda opt, variables, loss: opt.minimize(loss, variables),
    "minimize a tensor": _minimize_tensor,
    "compute_gradients": lambda opt, variables, loss: opt.apply_gradients(opt.compute_gradients(loss, variables)),
    "apply": lambda opt, variables, loss: opt.apply(_gradients(lambda: opt.scale_loss(loss()), variables), variables),
}


@_in_both_modes
@pytest.mark.parametrize(
    ("keras", "optimizers", "way"),
    [
        pytest.param(*kind, way, id=f"{id_}-{name}")
        for id_, kind in kinds().items()
        for name, way in _WAYS.items()
        if name != ("compute_gradients" if id_ == "keras3" else "apply")
    ],
)
def test_every_way_of_writing_a_loop_trains_as_without_a_wrapper(
    keras: ModuleType, optimizers: ModuleType, way: _Way, compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    inner, plain = optimizers.Adam(0.5), optimizers.Adam(0.5)
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
            kerases.take_step(plain, plain_variables, [2 * factor * kernel, factor * tf.ones_like(bias)])
        assert values([*wrapped_variables, *variables_of(inner)]) == values([*plain_variables, *variables_of(plain)])
    assert (float(opt.loss_scale), int(opt.iterations), int(opt.skipped_steps)) == (SCALE / 8, 3, 3)
    assert not _warnings(caplog)


@for_every_keras()
def test_fit_and_both_kinds_of_loop_can_alternate(keras: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model = kerases.linear_model(keras, wrap(optimizer(keras)))
    for step, way in enumerate([None, _scale_loss, None, _get_scaled_loss, None, _scale_loss, _get_scaled_loss, None]):
        if way is None:
            kerases.fit_linear(model, [1])
        else:
            way(model.optimizer, model.trainable_variables, lambda: tf.reduce_sum(model(tf.ones([1, 1]))))
        assert values(model.weights) == [[[-0.5 * (step + 1)]]]
    assert not _warnings(caplog)


class _Loop(NamedTuple):
    """An optimizer and two weights, 1 and 2, whose gradients are 1 and 3, and a style to scale the loss."""

    opt: Any
    weights: list[Any]
    style: str

    def scaled(self) -> list[tf.Tensor]:
        first, second = self.weights
        return _gradients(lambda: getattr(self.opt, self.style)(first * 1.0 + second * 3.0), self.weights)

    def unscaled(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(self.opt.get_unscaled_gradients(grads))

    def apply(self, grads: list[tf.Tensor]) -> None:
        self.opt.apply_gradients(zip(grads, self.weights, strict=True))

    def run(self, step: Callable[["_Loop"], None], compiled: bool, times: int = 1) -> None:
        run = functools.partial(step, self)
        take = tf.function(run, autograph=False) if compiled else run
        for _ in range(times):
            take()


def _loop(keras: ModuleType, style: str = "get_scaled_loss", optimizers: ModuleType | None = None) -> _Loop:
    inner = (optimizers or keras.optimizers).SGD(0.5)
    loop = _Loop(wrap(inner), [variable(keras, 1.0), variable(keras, 2.0)], style)
    if hasattr(inner, "build"):
        loop.opt.build(loop.weights)
    return loop


def _throws_away(loop: _Loop) -> None:
    grads = loop.scaled()
    loop.unscaled(grads)
    loop.apply(grads)


def _clips_the_argument(loop: _Loop) -> None:
    grads = loop.scaled()
    loop.unscaled(grads)
    loop.apply(tf.clip_by_global_norm(grads, 1.0)[0])


def _unscales_a_part(loop: _Loop) -> None:
    first, second = loop.scaled()
    loop.apply([*tf.clip_by_global_norm(loop.unscaled([first]), 0.5)[0], second])


def _adds_a_penalty(loop: _Loop) -> None:
    first, _ = loop.scaled()
    _, weight = loop.weights
    penalty = _gradients(lambda: weight * weight, [weight])
    loop.apply([*tf.clip_by_global_norm(loop.unscaled([first]), 0.5)[0], *penalty])


def _unscales_twice(loop: _Loop) -> None:
    loop.unscaled(loop.unscaled(loop.scaled()))


def _looks(loop: _Loop) -> None:
    loop.unscaled(loop.scaled())


def _fails(loop: _Loop) -> None:
    _looks(loop)
    raise ValueError("of the loop")


_COMPUTED_AFTER = r"apply_gradients got gradients \(1 of 2\) that were computed after the loss was scaled"


@_in_both_modes
@_in_both_styles
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([_throws_away], r"apply_gradients got gradients that were passed to get_unscaled_gradients"),
        ([_clips_the_argument], r"apply_gradients got .* clip what get_unscaled_gradients returned"),
        ([_unscales_a_part], _COMPUTED_AFTER),
        ([_adds_a_penalty], _COMPUTED_AFTER),
        ([_unscales_twice], r"got gradients that it returned: they would be divided .* twice"),
        # Gradients were unscaled before without a step.
        ([_looks, _unscales_a_part], "apply_gradients got .* that were computed after the loss was scaled"),
        ([_fails, _unscales_a_part], "apply_gradients got .* that were computed after the loss was scaled"),
    ],
)
@kerases.for_every_kind
def test_gradients_that_are_not_or_not_all_unscaled_are_refused(
    keras: ModuleType,
    optimizers: ModuleType,
    steps: list[Callable[[_Loop], None]],
    message: str,
    style: str,
    compiled: bool,
) -> None:
    loop = _loop(keras, style, optimizers)
    *before, step = steps
    if step is _throws_away and (style == "scale_loss" or keras.__version__.startswith("3.")):
        # The step unscales them.
        loop.run(step, compiled, times=2)
        assert values(loop.weights) == [0, -1]
        return
    if step is _clips_the_argument and not compiled:
        pytest.skip("only a graph tells what a tensor was computed from")
    for each in before:
        with contextlib.suppress(ValueError):
            loop.run(each, compiled)
    with pytest.raises(RuntimeError, match=message):
        loop.run(step, compiled)
    assert values(loop.weights) == [1, 2]


@_in_both_styles
@for_every_keras()
def test_other_half_of_the_gradients_is_not_applied_as_it_is(keras: ModuleType, style: str) -> None:
    loop = _loop(keras, style)
    grads = loop.scaled()
    loop.opt.apply_gradients([(loop.unscaled(grads[:1])[0], loop.weights[0])])
    with pytest.raises(RuntimeError, match=r"apply_gradients got .* that were computed after the loss was scaled"):
        loop.opt.apply_gradients([(grads[1], loop.weights[1])])
    assert values(loop.weights) == [0.5, 2]
    if keras.__version__.startswith("3.") and style == "get_scaled_loss":
        # Those that were to be unscaled before the last step.
        loop = _loop(keras, style)
        grads = loop.scaled()
        loop.unscaled(grads)
        loop.opt.apply_gradients([(grads[0], loop.weights[0])])
        with pytest.raises(RuntimeError, match=r"got gradients that were passed to get_unscaled_gradients"):
            loop.opt.apply_gradients([(grads[1], loop.weights[1])])
        assert values(loop.weights) == [0.5, 2]


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


@for_every_keras()
def test_gradients_in_true_magnitude_of_another_loss_and_sums_are_applied_as_they_are(keras: ModuleType) -> None:
    loop, zero = _loop(keras), tf.constant(0.0)
    for other in (lambda: tf.constant(2.0), lambda: zero):
        loop.apply([loop.unscaled(loop.scaled()[:1])[0], other()])
    assert values(loop.weights) == [0, 1]
    for _ in range(2):
        sums = [tf.constant(0.0), tf.constant(0.0)]
        for _ in range(3):
            sums = [total + grad for total, grad in zip(sums, loop.unscaled(loop.scaled()), strict=True)]
        loop.apply(sums)
    assert values(loop.weights) == [-3, -8]


@for_every_keras()
def test_replicas_that_throw_unscaled_values_away_train_alike(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        loop = _loop(keras, "scale_loss")

    def step() -> None:
        grads = loop.scaled()
        loop.unscaled(grads)
        # Another replica runs meanwhile.
        tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
        loop.apply(grads)

    run = tf.function(lambda: two_replicas.run(step))
    for _ in range(2):
        run()
    assert values(loop.weights) == [-1, -4]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfmp"]


def _scales_alone(opt: Any, weight: Any) -> None:
    opt.get_scaled_loss(tf.constant(1.0))
    opt.apply_gradients([(tf.constant([SCALE, 0]), weight)])


def _applies_alone(opt: Any, weight: Any) -> None:
    opt.apply_gradients([(tf.constant([SCALE, 0]), weight)])


def _unscales_alone(opt: Any, weight: Any) -> None:
    opt.get_unscaled_gradients([tf.constant([1.0])])


_AS_THEY_ARE = "applied as they are, and {} was not called before"


@pytest.mark.parametrize(
    ("step", "of_keras_2", "of_keras_3"),
    [
        (_scales_alone, *[(_AS_THEY_ARE.format("get_unscaled_gradients"), [1 - SCALE, 2])] * 2),
        (
            _applies_alone,
            (_AS_THEY_ARE.format("get_scaled_loss"), [1 - SCALE, 2]),
            ("divided by the loss scale, and scale_loss was not called before", [0, 2]),
        ),
        (_unscales_alone, *[("the loss was not scaled before", [1, 2])] * 2),
    ],
)
@for_every_keras()
def test_step_whose_loss_or_gradients_were_not_scaled_or_unscaled_warns_once(
    keras: ModuleType, step: Any, of_keras_2: Any, of_keras_3: Any, caplog: pytest.LogCaptureFixture
) -> None:
    message, expected = of_keras_3 if keras.__version__.startswith("3.") else of_keras_2
    weight, opt = variable(keras, [1, 2]), wrap(optimizer(keras))
    for _ in range(2):
        step(opt, weight)
    (warning,) = _warnings(caplog)
    assert message in warning
    assert weight.numpy().tolist() == expected


@pytest.mark.parametrize("host", ["tf1", *kinds()])
@_in_both_modes
def test_warning_names_the_line(host: str, caplog: pytest.LogCaptureFixture, compiled: bool) -> None:
    keras, optimizers = kinds().get(host, (None, None))
    inner = optimizers.SGD(0.5) if optimizers else tf.compat.v1.train.GradientDescentOptimizer(0.5)
    weight, opt = variable(keras, [1, 2]), wrap(inner)

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
