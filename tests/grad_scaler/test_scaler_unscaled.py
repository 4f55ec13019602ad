"""Gradients that a step gets after `unscale`: scaled ones are unscaled, and where that is not known it is an error."""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf

import tfmp

_HOSTS = ["tf1", *kerases.installed()]
_IN_BOTH_MODES = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
#: Clip a list of gradients to a global norm.
_CLIPS: dict[str, Callable[..., Any]] = {
    "tfmp": tfmp.clip_by_global_norm,
    "TensorFlow": tf.clip_by_global_norm,
    "the user": lambda grads, norm: ([grad * norm / tf.linalg.global_norm(grads) for grad in grads], None),
}


def _sgd(host: str = "tf1") -> Any:
    if host == "tf1":
        return tf.compat.v1.train.GradientDescentOptimizer(0.5)
    return kerases.installed()[host].optimizers.SGD(0.5)


class _Training:
    """Two weights whose gradients are 1 and a factor."""

    def __init__(self, host: str = "tf1") -> None:
        self.scaler, self.optimizer = tfmp.GradScaler(1024.0), _sgd(host)
        self.weights = [tf.Variable(1.0, name="first"), tf.Variable(2.0, name="second")]
        self.scaler.prepare(self.optimizer, self.weights)

    def scaled(self, factor: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = self.scaler.scale(self.weights[0] + self.weights[1] * factor)
        return list(tape.gradient(loss, self.weights))

    def unscale(self, grads: Sequence[Any]) -> list[Any]:
        return self.scaler.unscale(self.optimizer, grads)

    def step(self, grads: Sequence[Any]) -> None:
        self.scaler.step(self.optimizer, zip(grads, self.weights[-len(grads) :], strict=True))

    def run(self, iterate: Callable[[tf.Tensor], None], compiled: bool, *factors: float) -> tuple[Any, ...]:
        def whole(factor: tf.Tensor) -> None:
            iterate(factor)
            self.scaler.update()

        run = tf.function(whole) if compiled else whole
        for factor in factors:
            run(tf.constant(factor))
        weights = tuple(round(float(weight), 6) for weight in self.weights)
        return (*weights, float(self.scaler.loss_scale), int(self.scaler.skipped_steps))


@_IN_BOTH_MODES
@pytest.mark.parametrize("host", _HOSTS)
def test_gradients_whose_unscaled_values_are_thrown_away_are_applied_unscaled(host: str, compiled: bool) -> None:
    training = _Training(host)

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        training.unscale(grads)
        training.step(grads)

    assert training.run(iterate, compiled, 3.0, math.inf) == (0.5, 0.5, 512, 1)


def test_sparse_gradient_whose_unscaled_values_are_thrown_away_is_applied_unscaled() -> None:
    training, table = _Training(), tf.Variable([1.0, 1.0])
    grad = tf.IndexedSlices(tf.constant([1024.0]), tf.constant([1]), tf.constant([2]))
    training.unscale([grad])
    training.scaler.step(training.optimizer, [(grad, table)])
    assert table.numpy().tolist() == [1, 0.5]


_SAYS_WHAT_TO_CLIP = r"step cannot tell which gradients .* are still scaled: some were .*\. Clip what unscale returned"


@pytest.mark.parametrize("num_unscaled", [1, 2], ids=["a part", "all"])
@pytest.mark.parametrize("clip", _CLIPS)
@pytest.mark.parametrize("host", _HOSTS)
def test_clipping_the_argument_of_unscale_is_refused_in_a_function(host: str, clip: str, num_unscaled: int) -> None:
    training = _Training(host)

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        training.unscale(grads[:num_unscaled])
        clipped, _ = _CLIPS[clip](grads[:num_unscaled], 1.0)
        training.step([*clipped, *grads[num_unscaled:]])

    with pytest.raises(RuntimeError, match=_SAYS_WHAT_TO_CLIP):
        training.run(iterate, True, 3.0)
    assert [float(weight) for weight in training.weights] == [1, 2]


def test_clipping_the_argument_of_unscale_is_refused_in_a_graph() -> None:
    with tf.Graph().as_default():
        weight, optimizer, scaler = tf.compat.v1.get_variable("w", initializer=1.0), _sgd(), tfmp.GradScaler(1024.0)
        grads = tf.gradients(scaler.scale(weight * 2.0), [weight])
        (unscaled,) = scaler.unscale(optimizer, grads)
        with pytest.raises(RuntimeError, match=_SAYS_WHAT_TO_CLIP):
            scaler.step(optimizer, [(tf.clip_by_value(grads[0], -1.0, 1.0), weight)])
        scaler.step(optimizer, [(tf.clip_by_value(unscaled, -1.0, 1.0), weight)])
        update = scaler.update()
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(update)
            assert session.run(weight) == 0.5


@_IN_BOTH_MODES
@pytest.mark.parametrize("clip", _CLIPS)
@pytest.mark.parametrize("host", _HOSTS)
def test_part_that_is_unscaled_and_clipped_steps_with_the_rest(host: str, clip: str, compiled: bool) -> None:
    training = _Training(host)

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        clipped, _ = _CLIPS[clip](training.unscale(grads[:1]), 0.1)
        training.step([*clipped, *grads[1:]])

    assert training.run(iterate, compiled, 3.0, math.inf) == (0.95, 0.5, 512, 1)


@_IN_BOTH_MODES
def test_infinity_in_the_part_that_is_unscaled_skips_the_rest_too(compiled: bool) -> None:
    training = _Training()

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        clipped = [tf.clip_by_value(grad, -0.1, 0.1) for grad in training.unscale(grads[1:])]
        training.step([grads[0], *clipped])

    assert training.run(iterate, compiled, 3.0, math.inf) == (0.5, 1.95, 512, 1)


@_IN_BOTH_MODES
@pytest.mark.parametrize("is_persistent", [False, True], ids=["one gradient call", "one for each group"])
@pytest.mark.parametrize("host", _HOSTS)
def test_each_group_is_unscaled_and_clipped_by_itself(host: str, is_persistent: bool, compiled: bool) -> None:
    training = _Training(host)

    def iterate(factor: tf.Tensor) -> None:
        if is_persistent:
            with tf.GradientTape(persistent=True) as tape:
                loss = training.scaler.scale(training.weights[0] + training.weights[1] * factor)
            groups = ([tape.gradient(loss, weight)] for weight in training.weights)
        else:
            groups = ([grad] for grad in training.scaled(factor))
        clipped = [tf.clip_by_global_norm(training.unscale(group), 0.1)[0][0] for group in groups]
        training.step(clipped)

    assert training.run(iterate, compiled, 3.0, math.inf) == (0.95, 1.95, 512, 1)


def test_norm_and_largest_magnitude_are_of_both_parts() -> None:
    weights, optimizer = [tf.Variable(0.0), tf.Variable(0.0)], _sgd()
    for index in range(2):
        scaler = tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager())
        scaler.record_gradient_norm()
        grads = [scaler.scale(tf.constant(value)) for value in (3.0, 4.0)]
        (unscaled,) = scaler.unscale(optimizer, [grads[index]])
        grads[index] = unscaled * 0.5
        scaler.step(optimizer, zip(grads, weights, strict=True))
        assert float(scaler.gradient_norm) == 5
        assert float(scaler._iteration.pending.get("max_abs")) == 4
        scaler.update()


def test_window_is_not_unscaled_beside_other_gradients() -> None:
    training = _Training()
    accumulator = tfmp.GradientAccumulator(training.weights[:1], 1)
    grads = training.scaled(tf.constant(3.0))
    accumulator.add(grads[:1], training.scaler.loss_scale)
    training.scaler.unscale(training.optimizer, accumulator)
    with pytest.raises(RuntimeError, match=r"unscale was called already .* and one of the calls got an accumulator"):
        training.unscale(grads[1:])


@_IN_BOTH_MODES
@pytest.mark.parametrize("again", ["given", "returned"])
def test_the_same_gradients_are_not_unscaled_twice(again: str, compiled: bool) -> None:
    training = _Training()

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        returned = training.unscale(grads)
        training.unscale(grads if again == "given" else returned)

    with pytest.raises(RuntimeError, match=r"unscale was called already for this optimizer .* with these gradients"):
        training.run(iterate, compiled, 3.0)


def _clip_and_unscale_again(training: _Training, grads: list[tf.Tensor]) -> None:
    clipped, _ = tf.clip_by_global_norm(training.unscale(grads), 0.1)
    training.step(training.unscale(clipped))


def _differentiate_after_unscale(training: _Training, grads: list[tf.Tensor]) -> None:
    clipped, _ = tf.clip_by_global_norm(training.unscale(grads[:1]), 0.1)
    training.step([*clipped, *training.scaled(tf.constant(3.0))[1:]])


def _replace_by_earlier(training: _Training, grads: list[tf.Tensor]) -> None:
    earlier = [tf.constant(1.0), tf.constant(2.0)]
    training.unscale(grads)
    # These are as old as gradients that are still scaled.
    training.step([tf.constant(0.5), earlier[1]])
    training.step(earlier)


@_IN_BOTH_MODES
@pytest.mark.parametrize("mistake", [_clip_and_unscale_again, _differentiate_after_unscale, _replace_by_earlier])
def test_step_is_refused_if_some_gradients_may_be_scaled_or_not(
    mistake: Callable[[_Training, list[tf.Tensor]], None], compiled: bool
) -> None:
    training = _Training()
    message = (
        r"step cannot tell which gradients of this optimizer .* unscale returned \d gradients, but \d of the gradients "
        r"passed to step may be among them or computed from them. Compute all gradients before you first call unscale"
    )
    with pytest.raises(RuntimeError, match=message):
        training.run(lambda factor: mistake(training, training.scaled(factor)), compiled, 3.0)
    assert [float(weight) for weight in training.weights] == [1, 2]


def test_some_of_the_unscaled_gradients_may_be_left_out() -> None:
    training = _Training()

    def iterate(factor: tf.Tensor) -> None:
        _, second = training.unscale(training.scaled(factor))
        training.step([tf.minimum(second, 1.0)])

    assert training.run(iterate, False, 3.0) == (1, 1.5, 1024, 0)


def test_gradients_in_variables_are_not_guessed_to_be_scaled() -> None:
    training, sums = _Training(), [tf.Variable(1024.0), tf.Variable(3072.0)]
    training.unscale(sums)
    with pytest.raises(RuntimeError, match="a gradient is a ResourceVariable that was also passed to be unscaled"):
        training.step(sums)


@pytest.mark.parametrize("make", [tf.Variable, np.array], ids=["variable", "array"])
def test_sparse_gradients_whose_rows_are_a_variable_or_an_array_are_not_guessed_to_be_unscaled(
    make: Callable[[list[float]], Any],
) -> None:
    training, table = _Training(), tf.Variable([1.0, 1.0])
    grad = tf.IndexedSlices(make([1024.0]), tf.constant([1]), tf.constant([2]))
    training.unscale([grad])
    with pytest.raises(RuntimeError, match=r"a gradient is a \w+ that was also passed to be unscaled"):
        training.scaler.step(training.optimizer, [(grad, table)])
    training.scaler.update()
    training.scaler.step(training.optimizer, [(grad, table)])
    assert table.numpy().tolist() == [1, 0.5]


@pytest.mark.parametrize("makes_own", [False, True], ids=["same gradients", "gradients of each branch"])
def test_branch_that_drops_its_step_leaves_the_other_branch_to_step(makes_own: bool) -> None:
    results = []
    for compiled in (False, True):
        training = _Training()

        def iterate(drops: tf.Tensor, training: _Training = training) -> None:
            grads = training.scaled(tf.constant(3.0))
            if drops:
                training.unscale(training.scaled(tf.constant(3.0)) if makes_own else grads)
            else:
                training.step(training.scaled(tf.constant(3.0)) if makes_own else grads)

        results.append(training.run(iterate, compiled, True, False))
        assert int(training.scaler.attempted_steps) == 1
    assert results == [(0.5, 0.5, 1024, 0)] * 2


def test_step_after_a_conditional_that_unscales_knows_the_scaled_gradients_only() -> None:
    training = _Training()

    def with_same(looks: tf.Tensor) -> None:
        grads = training.scaled(tf.constant(3.0))
        if looks:
            training.unscale(grads)
        training.step(grads)

    assert training.run(with_same, True, True, False) == (0, -1, 1024, 0)

    def with_result(clips: tf.Tensor) -> None:
        grads = training.scaled(tf.constant(3.0))
        if clips:
            grads = training.unscale(grads)
        training.step(grads)

    with pytest.raises(RuntimeError, match=r"outside of the tf.function that step is called in"):
        training.run(with_result, True, True)


@pytest.mark.parametrize("passed", ["arguments", "results of a clip"])
def test_arguments_of_an_inner_function_are_not_guessed_to_be_unscaled(passed: str) -> None:
    training = _Training()

    @tf.function
    def apply(*grads: tf.Tensor) -> None:
        training.step(list(grads) if passed == "arguments" else tf.clip_by_global_norm(grads, 0.1)[0])

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        training.unscale(grads)
        apply(*grads)

    with pytest.raises(RuntimeError, match=r"outside of the tf.function that step is called in"):
        training.run(iterate, True, 3.0)


def test_inner_function_knows_the_gradients_that_are_not_its_arguments() -> None:
    training = _Training()

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        clipped, _ = tf.clip_by_global_norm(training.unscale(grads[:1]), 0.1)
        tf.function(lambda: training.step([*clipped, *grads[1:]]))()

    assert training.run(iterate, True, 3.0) == (0.95, 0.5, 1024, 0)


def test_disabled_scaler_passes_on_what_it_is_given() -> None:
    weights, optimizer, scaler = [tf.Variable(1.0), tf.Variable(2.0)], _sgd(), tfmp.GradScaler(enabled=False)
    for _ in range(2):
        grads = [tf.constant(1.0), tf.constant(3.0)]
        (first,) = scaler.unscale(optimizer, grads[:1])
        scaler.step(optimizer, zip([first * 0.5, grads[1]], weights, strict=True))
        scaler.update()
    assert [float(weight) for weight in weights] == [0.5, -1]


def test_update_forgets_the_gradients() -> None:
    training = _Training()
    grads = training.scaled(tf.constant(3.0))
    training.unscale(grads)
    training.scaler.update()
    assert not training.scaler._iteration.calls._unscaled
    # In the next iteration they are gradients of a scaled loss like any others.
    training.step(grads)
    assert [float(weight) for weight in training.weights] == [0.5, 0.5]


def test_gradients_of_a_trace_do_not_outlive_it() -> None:
    training = _Training()
    seen: list[Any] = []

    @tf.function
    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        seen.extend(map(weakref.ref, [*grads, *training.unscale(grads)]))

    iterate(tf.constant(3.0))
    training.scaler.update()
    del iterate
    gc.collect()
    assert [each() for each in seen] == [None] * 4


@_IN_BOTH_MODES
def test_infinity_in_a_gradient_that_was_unscaled_and_left_out_skips_the_step(compiled: bool) -> None:
    training = _Training()

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        training.unscale([grads[0] * factor, grads[1]])
        training.step(grads[1:])

    assert training.run(iterate, compiled, math.inf) == (1, 2, 512, 1)


@_IN_BOTH_MODES
def test_norm_counts_gradients_once_that_are_unscaled_twice(compiled: bool) -> None:
    training = _Training()
    training.scaler.record_gradient_norm()

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        unscaled = training.unscale(grads)
        training.step([unscaled[0] * 0.5, grads[1]])

    assert training.run(iterate, compiled, 0.0) == (0.75, 2, 1024, 0)
    assert float(training.scaler.gradient_norm) == 1
    assert training.run(iterate, compiled, math.sqrt(3)) == (0.5, round(2 - math.sqrt(3) / 2, 6), 1024, 0)
    assert float(training.scaler.gradient_norm) == pytest.approx(2)


def test_gradients_that_were_unscaled_before_the_last_update_are_not_unscaled_again() -> None:
    training = _Training()
    unscaled = training.unscale(training.scaled(tf.constant(3.0)))
    training.scaler.update()
    with pytest.raises(RuntimeError, match=r"unscale returned before the last update: they would be divided .* twice"):
        training.step(unscaled)
    first = training.unscale(training.scaled(tf.constant(3.0))[:1])
    with pytest.raises(RuntimeError, match="cannot tell which gradients"):
        training.step([first[0], unscaled[1]])
    assert [float(weight) for weight in training.weights] == [1, 2]


@_IN_BOTH_MODES
def test_zeros_may_stand_for_a_gradient_that_is_none(compiled: bool) -> None:
    training = _Training()

    def iterate(factor: tf.Tensor) -> None:
        unscaled = training.unscale([training.scaled(factor)[0], None])
        training.step([tf.zeros_like(training.weights[0]) if each is None else each for each in unscaled])

    assert training.run(iterate, compiled, 3.0) == (0.5, 2, 1024, 0)


def test_groups_that_overlap_are_refused() -> None:
    training = _Training()
    grads = training.scaled(tf.constant(3.0))
    training.unscale(grads[:1])
    with pytest.raises(RuntimeError, match=r"unscale was called already .* with these gradients"):
        training.unscale(grads)


def test_disabled_scaler_steps_with_gradients_in_variables() -> None:
    scaler, weight, grad = tfmp.GradScaler(enabled=False), tf.Variable(1.0), tf.Variable(0.5)
    optimizer = _sgd()
    scaler.step(optimizer, zip(scaler.unscale(optimizer, [grad]), [weight], strict=True))
    assert float(weight) == 0.75
