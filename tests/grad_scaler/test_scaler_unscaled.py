"""Gradients that a step gets after `unscale`: scaled ones are unscaled, and where that is not known it is an error."""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from scaler_loops import IN_BOTH_WAYS, WAYS, Training, sgd

import tfmp

#: Clip a list of gradients to a global norm.
_CLIPS: dict[str, Callable[..., Any]] = {
    "tfmp": tfmp.clip_by_global_norm,
    "TensorFlow": tf.clip_by_global_norm,
    "the user": lambda grads, norm: ([grad * norm / tf.linalg.global_norm(grads) for grad in grads], None),
}


class _Row(NamedTuple):
    """The calls of an iteration before `update`, and the state after iterations with these factors, or an error."""

    calls: Callable[[Training, Any], Any]
    expected: tuple[float, ...] | str
    factors: Sequence[Any] = (3.0, math.inf)
    ways: Sequence[str] = ("eager", "function")


def _clipped(grads: Any) -> list[Any]:
    return list(tf.clip_by_global_norm(grads, 0.1)[0])


def _differentiate_each_group_when_it_is_unscaled(t: Training, factor: Any) -> None:
    with tf.GradientTape(persistent=True) as tape:
        loss = t.scaler.scale(t.weights[0] + t.weights[1] * factor)
    t.step([_clipped(t.unscale([tape.gradient(loss, weight)]))[0] for weight in t.weights])


def _look_in_a_branch(t: Training, looks: tf.Tensor) -> None:
    grads = t.scaled()
    if looks:
        t.unscale(grads)
    t.step(grads)


def _step_in_one_of_two_conditionals(t: Training, unscales: tf.Tensor) -> None:
    if unscales:
        t.step(t.unscale(t.scaled()))
    if not unscales:
        t.step(t.scaled())


def _leave_out_infinity(t: Training, _: Any) -> None:
    first, second = t.scaled()
    t.unscale([first * math.inf, second])
    t.step([second])


def _pass_one_as_it_was_and_one_clipped_beside_another(t: Training, factor: Any) -> None:
    first, second = t.scaled(factor)
    third = first * 1.0
    _, unscaled = t.unscale([first, second])
    weights = [t.weights[0], t.weights[1], t.weights[0]]
    t.scaler.step(t.optimizer, zip([first, tf.minimum(unscaled, 1.0), third], weights, strict=True))


def _clip_first(t: Training, factor: Any, clip: Callable[..., Any] = tf.clip_by_global_norm) -> list[Any]:
    grads = t.scaled(factor)
    return [*clip(t.unscale(grads[:1]), 0.1)[0], grads[1]]


def _clip_the_argument(t: Training, _: Any, clip: Callable[..., Any], num: int) -> None:
    grads = t.scaled()
    t.unscale(grads[:num])
    t.step([*clip(grads[:num], 1.0)[0], *grads[num:]])


def _replace_by_earlier(t: Training, _: Any) -> None:
    earlier = [tf.constant(1.0), tf.constant(2.0)]
    t.unscale(t.scaled())
    # These are as old as gradients that are still scaled.
    t.step([tf.constant(0.5), earlier[1]])
    t.step(earlier)


def _use_the_result_of_a_branch(t: Training, _: Any) -> None:
    grads = t.scaled()
    t.step(tf.cond(grads[0] > 0, lambda: t.unscale(grads), lambda: grads))


def _pass_to_an_inner_function(t: Training, _: Any, *, clips: bool) -> None:
    grads = t.scaled()
    t.unscale(grads)
    tf.function(lambda *given: t.step(_clipped(given) if clips else given))(*grads)


def _unscale_a_window_beside_others(t: Training, _: Any) -> None:
    accumulator, grads = tfmp.GradientAccumulator(t.weights[:1], 1), t.scaled()
    accumulator.add(grads[:1], t.scaler.loss_scale)
    t.unscale(accumulator)
    t.unscale(grads[1:])


def _of_the_last_iteration(t: Training, _: Any, *, some: bool) -> None:
    unscaled = t.unscale(t.scaled())
    t.scaler.update()
    t.step([*t.unscale(t.scaled()[:1]), unscaled[1]] if some else unscaled)


def _step_with_what_unscale_got_before_the_update(t: Training, _: Any) -> None:
    grads = t.scaled()
    t.unscale(grads)
    t.scaler.update()
    t.step(grads)


def _step_again_after_an_update_outside(t: Training, _: Any) -> None:
    t.step(t.unscale(t.scaled()))
    with tf.init_scope():
        t.scaler.update(1024.0)
    t.step(t.scaled())


def _sums(t: Training, _: Any) -> None:
    sums = [tf.Variable(1024.0), tf.Variable(3072.0)]
    t.unscale(sums)
    t.step(sums)


_SAYS_WHAT_TO_CLIP = r"step cannot tell which gradients .* are still scaled: some were .*\. Clip what unscale returned"
_CANNOT_TELL = (
    r"step cannot tell which gradients of this optimizer .* unscale returned \d gradients, but \d of the gradients "
    r"passed to step may be among them or computed from them. Compute all gradients before you first call unscale"
)
_OUTSIDE = r"outside of the tf.function that step is called in: call both in the same"
_BEFORE_UPDATE = r"unscale returned before the last update: they would be divided .* twice"
_TWICE = r"unscale was called already for this optimizer .* with these gradients"
_VARIABLE = "a gradient is a ResourceVariable that was also passed to be unscaled"

_FINITE, _IN_FUNCTION, _EAGER = (3.0,), ("function",), ("eager",)
_ROWS = {
    **{
        f"a part is clipped by {name}": _Row(
            lambda t, factor, clip=clip: t.step(_clip_first(t, factor, clip)),  # type: ignore[misc] # the default
            (0.95, 0.5, 512, 1),
        )
        for name, clip in _CLIPS.items()
    },
    # The second group is younger than the result of the first.
    "each group is differentiated when it is unscaled": _Row(
        _differentiate_each_group_when_it_is_unscaled, (0.95, 1.95, 512, 1)
    ),
    "a result is left out": _Row(
        lambda t, factor: t.step([tf.minimum(t.unscale(t.scaled(factor))[1], 1.0)]), (1, 1.5, 1024, 0), _FINITE
    ),
    "one as it was, one clipped, and another": _Row(
        _pass_one_as_it_was_and_one_clipped_beside_another, (0, 1.5, 1024, 0), _FINITE
    ),
    "infinity in a gradient that is left out skips the step": _Row(_leave_out_infinity, (1, 2, 512, 1), _FINITE),
    "zeros stand for None": _Row(
        lambda t, _: t.step([tf.zeros([]) if each is None else each for each in t.unscale([t.scaled()[0], None])]),
        (0.5, 2, 1024, 0),
        _FINITE,
    ),
    "an inner function captures the gradients": _Row(
        lambda t, factor: tf.function(partial(t.step, _clip_first(t, factor)))(),
        (0.95, 0.5, 1024, 0),
        _FINITE,
        _IN_FUNCTION,
    ),
    "an inner function gets None": _Row(
        lambda t, factor: tf.function(partial(t.step, [*t.unscale(t.scaled(factor)[:1]), None]))(),
        (0.5, 2, 1024, 0),
        _FINITE,
        _IN_FUNCTION,
    ),
    # In the next iteration they are gradients of a scaled loss like any others.
    "arguments of the last iteration": _Row(
        _step_with_what_unscale_got_before_the_update, (0.5, 0.5, 1024, 0), _FINITE, _EAGER
    ),
    "a later conditional steps with its own": _Row(_step_in_one_of_two_conditionals, (0, -1, 1024, 0), [True, False]),
    "a branch only looks": _Row(_look_in_a_branch, (0, -1, 1024, 0), [True, False]),
    **{
        f"{num} clipped by {name}": _Row(
            partial(_clip_the_argument, clip=clip, num=num), _SAYS_WHAT_TO_CLIP, ways=_IN_FUNCTION
        )
        for name, clip in _CLIPS.items()
        for num in (1, 2)
    },
    "the results again": _Row(lambda t, _: t.unscale(t.unscale(t.scaled())), _TWICE),
    "clipped results again": _Row(lambda t, _: t.step(t.unscale(_clipped(t.unscale(t.scaled())))), _CANNOT_TELL),
    "gradients after unscale": _Row(lambda t, _: t.step([_clip_first(t, 3.0)[0], t.scaled()[1]]), _CANNOT_TELL),
    "replaced by earlier ones": _Row(_replace_by_earlier, _CANNOT_TELL),
    "result of a branch": _Row(_use_the_result_of_a_branch, _OUTSIDE, ways=_IN_FUNCTION),
    "arguments of an inner function": _Row(
        partial(_pass_to_an_inner_function, clips=False), _OUTSIDE, ways=_IN_FUNCTION
    ),
    "clipped arguments": _Row(partial(_pass_to_an_inner_function, clips=True), _OUTSIDE, ways=_IN_FUNCTION),
    "window beside others": _Row(_unscale_a_window_beside_others, "one of the calls got an accumulator", ways=_EAGER),
    "of the last iteration": _Row(partial(_of_the_last_iteration, some=False), _BEFORE_UPDATE, ways=_EAGER),
    "some of the last iteration": _Row(partial(_of_the_last_iteration, some=True), "cannot tell which", ways=_EAGER),
    "a step after an update outside": _Row(
        _step_again_after_an_update_outside, "step was called already", ways=_IN_FUNCTION
    ),
    "variables": _Row(_sums, _VARIABLE, ways=_EAGER),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, row in _ROWS.items() for way in row.ways])
def test_step_unscales_what_is_still_scaled_or_refuses_what_may_be(name: str, way: str) -> None:
    training, (calls, expected, factors, _) = Training(), _ROWS[name]
    iterate = partial(training.run, lambda factor: calls(training, factor), way)
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            iterate(3.0)
        assert training.state()[:2] == (1, 2)
    else:
        assert iterate(*factors) == expected


@pytest.mark.parametrize("make", [tf.constant, tf.Variable, np.array], ids=["tensor", "variable", "array"])
def test_sparse_gradients_are_known_by_their_rows(make: Callable[[list[float]], Any]) -> None:
    training, table = Training(), tf.Variable([1.0, 1.0])
    grad = tf.IndexedSlices(make([1024.0]), tf.constant([1]), tf.constant([2]))
    training.unscale([grad])
    if make is not tf.constant:
        # The rows may have been replaced since.
        with pytest.raises(RuntimeError, match=r"a gradient is a \w+ that was also passed to be unscaled"):
            training.scaler.step(training.optimizer, [(grad, table)])
        training.scaler.update()
    training.scaler.step(training.optimizer, [(grad, table)])
    assert table.numpy().tolist() == [1, 0.5]


@IN_BOTH_WAYS
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_norm_and_largest_magnitude_are_of_both_parts_and_count_them_once(index: int, both: bool, way: str) -> None:
    training = Training(tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager()))
    alone = tfmp.LogMaxLossScaleManager()
    training.scaler.record_gradient_norm()

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        (unscaled,) = training.unscale(grads)[index:][:1] if both else training.unscale([grads[index]])
        grads[index] = unscaled * 0.5
        training.step(grads)

    for factor, norm in [(0.0, 1), (math.sqrt(3), 2)]:
        training.run(iterate, way, factor)
        alone.update_loss_scale(tf.constant(True), tf.constant(max(1.0, factor)))
        assert float(training.scaler.gradient_norm) == pytest.approx(norm)
    assert training.scaler.state_dict() == alone.state_dict()


@pytest.mark.parametrize("end", [tfmp.GradScaler.update, tfmp.GradScaler.abandon])
def test_gradients_are_forgotten_although_the_manager_raises_an_error(end: Callable[..., Any]) -> None:
    class Raising(tfmp.FixedLossScaleManager):
        def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
            raise OSError("the scale cannot be logged")

    training = Training(tfmp.GradScaler(manager=Raising(1024)))
    training.unscale(training.scaled())
    with pytest.raises(OSError, match="cannot be logged"):
        end(training.scaler)
    training.step(training.scaled())
    assert training.state()[:2] == (0.5, 0.5)


@pytest.mark.parametrize(
    ("unscales", "steps"), [("eager", "function"), ("function", "eager"), ("function", "function")]
)
def test_unscale_and_step_are_in_one_function_or_both_in_eager_code(unscales: str, steps: str) -> None:
    training = Training()
    step = WAYS[steps](training.step)

    @WAYS[unscales]
    def unscale() -> None:
        training.unscale(training.scaled())
        # The step of another optimizer does not use what was found.
        training.scaler.step(sgd(), [(tf.constant(0.0), training.weights[0])])

    unscale()
    with pytest.raises(RuntimeError, match=_OUTSIDE):
        step([tf.constant(1024.0)])
    training.scaler.update()
    # Though the function that was traced is still there, what it unscaled is forgotten.
    step([tf.constant(1024.0)])
    assert training.state()[:2] == (1, 1.5)


def test_update_in_a_function_keeps_what_eager_code_unscaled() -> None:
    training = Training()
    unscaled = training.unscale(training.scaled())

    @tf.function
    def iterate() -> None:
        training.scaler.step(sgd(), [(tf.constant(0.0), training.weights[0])])
        training.scaler.update()

    iterate()
    training.step(unscaled)
    assert training.state()[:2] == (0.5, 0.5)


def test_failed_trace_of_a_function_leaves_no_calls_behind() -> None:
    training = Training()

    def iterate(labels: tf.Tensor | None) -> None:
        unscaled = training.unscale(training.scaled())
        if labels is None:
            raise ValueError("this batch has no labels")
        training.step(unscaled)
        training.scaler.update()

    with pytest.raises(ValueError, match="no labels"):
        tf.function(iterate)(None)
    tf.function(iterate)(tf.constant(1.0))
    assert training.state() == (0.5, 0.5, 1024, 0)


def test_unscale_does_not_keep_the_graph_of_its_trace_alive() -> None:
    training, seen = Training(), list[Any]()

    @tf.function
    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        seen.extend(map(weakref.ref, [factor.graph, *grads, *training.unscale(grads)]))

    iterate(tf.constant(3.0))
    training.scaler.update()
    del iterate
    gc.collect()
    assert [each() for each in seen] == [None] * 5


@pytest.mark.parametrize("make", [tf.constant, tf.Variable])
def test_disabled_scaler_passes_on_what_it_is_given(make: Callable[[float], Any]) -> None:
    training = Training(tfmp.GradScaler(enabled=False))
    for _ in range(2):
        (first,) = training.unscale([make(1.0)])
        training.step([first, make(3.0)])
        training.scaler.update()
    assert [float(weight) for weight in training.weights] == [0, -1]
