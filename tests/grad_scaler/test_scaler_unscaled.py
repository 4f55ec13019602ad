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
from scaler_loops import HOSTS, IN_BOTH_WAYS, WAYS, Training, sgd

import tfmp

#: Clip a list of gradients to a global norm.
_CLIPS: dict[str, Callable[..., Any]] = {
    "tfmp": tfmp.clip_by_global_norm,
    "TensorFlow": tf.clip_by_global_norm,
    "the user": lambda grads, norm: ([grad * norm / tf.linalg.global_norm(grads) for grad in grads], None),
}


class _Iteration(NamedTuple):
    """The calls of an iteration before `update`, the factors that it runs with, and the state after them."""

    calls: Callable[[Training, Any], Any]
    state: tuple[float, ...]
    factors: Sequence[Any] = (3.0, math.inf)
    ways: Sequence[str] = ("eager", "function")
    hosts: Sequence[str] = HOSTS


def _step_with(unscaled: Callable[[Training, Any], list[Any]]) -> Callable[[Training, Any], None]:
    return lambda training, factor: training.step(unscaled(training, training.scaled(factor)))


def _clip_first(clip: Callable[..., Any]) -> Callable[[Training, Any], list[Any]]:
    return lambda training, grads: [*clip(training.unscale(grads[:1]), 0.1)[0], grads[1]]


def _each_group(training: Training, groups: Any) -> list[Any]:
    return [tf.clip_by_global_norm(training.unscale([grad]), 0.1)[0][0] for grad in groups]


def _differentiate_each_group_when_it_is_unscaled(training: Training, factor: Any) -> None:
    with tf.GradientTape(persistent=True) as tape:
        loss = training.scaler.scale(training.weights[0] + training.weights[1] * factor)
    training.step(_each_group(training, (tape.gradient(loss, weight) for weight in training.weights)))


def _none_becomes_zeros(training: Training, grads: list[Any]) -> list[Any]:
    return [tf.zeros_like(training.weights[0]) if each is None else each for each in training.unscale([grads[0], None])]


def _step_in_an_inner_function(training: Training, factor: Any) -> None:
    grads = training.scaled(factor)
    clipped = _clip_first(tf.clip_by_global_norm)(training, grads)
    tf.function(lambda: training.step(clipped))()


def _step_with_none_in_an_inner_function(training: Training, factor: Any) -> None:
    unscaled = training.unscale(training.scaled(factor)[:1])
    tf.function(lambda: training.step([*unscaled, None]))()


def _look_in_a_branch(training: Training, looks: tf.Tensor) -> None:
    grads = training.scaled()
    if looks:
        training.unscale(grads)
    training.step(grads)


def _step_in_one_of_two_conditionals(training: Training, unscales: tf.Tensor) -> None:
    if unscales:
        training.step(training.unscale(training.scaled()))
    if not unscales:
        training.step(training.scaled())


def _drop_in_a_branch_with_gradients_of_its_own(training: Training, drops: tf.Tensor) -> None:
    if drops:
        training.unscale(training.scaled())
    else:
        training.step(training.scaled())


_APPLIED = {
    "the results are thrown away": _Iteration(
        _step_with(lambda training, grads: [training.unscale(grads), grads][1]), (0.5, 0.5, 512, 1)
    ),
    **{
        f"a part is clipped by {name}": _Iteration(_step_with(_clip_first(clip)), (0.95, 0.5, 512, 1))
        for name, clip in _CLIPS.items()
    },
    "infinity in the part that is clipped skips the rest too": _Iteration(
        _step_with(lambda training, grads: [grads[0], tf.clip_by_value(training.unscale(grads[1:])[0], -0.1, 0.1)]),
        (0.5, 1.95, 512, 1),
    ),
    "each group is clipped": _Iteration(_step_with(_each_group), (0.95, 1.95, 512, 1)),
    # The second group is younger than the result of the first.
    "each group is differentiated when it is unscaled": _Iteration(
        _differentiate_each_group_when_it_is_unscaled, (0.95, 1.95, 512, 1)
    ),
    "a result is left out": _Iteration(
        _step_with(lambda training, grads: [tf.minimum(training.unscale(grads)[1], 1.0)]),
        (1, 1.5, 1024, 0),
        [3.0],
    ),
    "infinity in a gradient that is left out skips the step": _Iteration(
        _step_with(lambda training, grads: [training.unscale([grads[0] * math.inf, grads[1]]), grads[1:]][1]),
        (1, 2, 512, 1),
        [3.0],
    ),
    "zeros stand for None": _Iteration(_step_with(_none_becomes_zeros), (0.5, 2, 1024, 0), [3.0]),
    "an inner function captures the gradients": _Iteration(
        _step_in_an_inner_function, (0.95, 0.5, 1024, 0), [3.0], ["function"], ["tf1"]
    ),
    "an inner function gets None": _Iteration(
        _step_with_none_in_an_inner_function, (0.5, 2, 1024, 0), [3.0], ["function"], ["tf1"]
    ),
    "a later conditional steps with its own": _Iteration(
        _step_in_one_of_two_conditionals, (0, -1, 1024, 0), [True, False]
    ),
    "a branch only looks": _Iteration(_look_in_a_branch, (0, -1, 1024, 0), [True, False]),
    "a branch drops gradients of its own": _Iteration(
        _drop_in_a_branch_with_gradients_of_its_own, (0.5, 0.5, 1024, 0), [True, False]
    ),
}


@pytest.mark.parametrize(
    ("name", "way", "host"),
    [(name, way, host) for name, each in _APPLIED.items() for way in each.ways for host in each.hosts],
)
def test_step_unscales_what_is_still_scaled(name: str, way: str, host: str) -> None:
    training, iteration = Training(host=host), _APPLIED[name]
    state = training.run(lambda factor: iteration.calls(training, factor), way, *iteration.factors)
    assert state == iteration.state


_SAYS_WHAT_TO_CLIP = r"step cannot tell which gradients .* are still scaled: some were .*\. Clip what unscale returned"
_CANNOT_TELL = (
    r"step cannot tell which gradients of this optimizer .* unscale returned \d gradients, but \d of the gradients "
    r"passed to step may be among them or computed from them. Compute all gradients before you first call unscale"
)
_OUTSIDE = r"outside of the tf.function that step is called in: call both in the same"
_BEFORE_UPDATE = r"unscale returned before the last update: they would be divided .* twice"
_TWICE = r"unscale was called already for this optimizer .* with these gradients"


def _clip_the_argument(training: Training, clip: Callable[..., Any], num: int) -> None:
    grads = training.scaled()
    training.unscale(grads[:num])
    training.step([*clip(grads[:num], 1.0)[0], *grads[num:]])


def _again(training: Training, *, returned: bool) -> None:
    grads = training.scaled()
    results = training.unscale(grads)
    training.unscale(results if returned else grads)


def _clip_and_unscale_again(training: Training) -> None:
    clipped, _ = tf.clip_by_global_norm(training.unscale(training.scaled()), 0.1)
    training.step(training.unscale(clipped))


def _differentiate_after_unscale(training: Training) -> None:
    clipped = _clip_first(tf.clip_by_global_norm)(training, training.scaled())
    training.step([clipped[0], *training.scaled()[1:]])


def _replace_by_earlier(training: Training) -> None:
    earlier = [tf.constant(1.0), tf.constant(2.0)]
    training.unscale(training.scaled())
    # These are as old as gradients that are still scaled.
    training.step([tf.constant(0.5), earlier[1]])
    training.step(earlier)


def _use_the_result_of_a_branch(training: Training) -> None:
    grads = training.scaled()
    training.step(tf.cond(grads[0] > 0, lambda: training.unscale(grads), lambda: grads))


def _pass_to_an_inner_function(training: Training, *, clips: bool) -> None:
    grads = training.scaled()
    training.unscale(grads)
    tf.function(lambda *given: training.step(tf.clip_by_global_norm(given, 0.1)[0] if clips else given))(*grads)


def _unscale_a_window_beside_others(training: Training) -> None:
    accumulator, grads = tfmp.GradientAccumulator(training.weights[:1], 1), training.scaled()
    accumulator.add(grads[:1], training.scaler.loss_scale)
    training.unscale(accumulator)
    training.unscale(grads[1:])


def _of_the_last_iteration(training: Training, *, some: bool) -> None:
    unscaled = training.unscale(training.scaled())
    training.scaler.update()
    training.step([*training.unscale(training.scaled()[:1]), unscaled[1]] if some else unscaled)


def _sums(training: Training) -> None:
    sums = [tf.Variable(1024.0), tf.Variable(3072.0)]
    training.unscale(sums)
    training.step(sums)


_BOTH, _FUNCTION, _EAGER = ("eager", "function"), ("function",), ("eager",)
_REFUSED: list[tuple[str, Callable[[Training], None], str, Sequence[str]]] = [
    *(
        (f"{num} clipped by {name}", partial(_clip_the_argument, clip=clip, num=num), _SAYS_WHAT_TO_CLIP, _FUNCTION)
        for name, clip in _CLIPS.items()
        for num in (1, 2)
    ),
    ("the same again", partial(_again, returned=False), _TWICE, _BOTH),
    ("the results again", partial(_again, returned=True), _TWICE, _BOTH),
    ("clipped results again", _clip_and_unscale_again, _CANNOT_TELL, _BOTH),
    ("gradients after unscale", _differentiate_after_unscale, _CANNOT_TELL, _BOTH),
    ("replaced by earlier ones", _replace_by_earlier, _CANNOT_TELL, _BOTH),
    ("result of a branch", _use_the_result_of_a_branch, _OUTSIDE, _FUNCTION),
    ("arguments of an inner function", partial(_pass_to_an_inner_function, clips=False), _OUTSIDE, _FUNCTION),
    ("clipped arguments", partial(_pass_to_an_inner_function, clips=True), _OUTSIDE, _FUNCTION),
    ("window beside others", _unscale_a_window_beside_others, "one of the calls got an accumulator", _EAGER),
    ("of the last iteration", partial(_of_the_last_iteration, some=False), _BEFORE_UPDATE, _EAGER),
    ("some of the last iteration", partial(_of_the_last_iteration, some=True), "cannot tell which", _EAGER),
    ("variables", _sums, "a gradient is a ResourceVariable that was also passed to be unscaled", _EAGER),
]


@pytest.mark.parametrize(
    ("calls", "message", "way"),
    [pytest.param(calls, message, way, id=f"{name}-{way}") for name, calls, message, ways in _REFUSED for way in ways],
)
def test_gradients_that_may_be_scaled_or_not_are_refused(
    calls: Callable[[Training], None], message: str, way: str
) -> None:
    training = Training()
    with pytest.raises(RuntimeError, match=message):
        training.run(lambda _: calls(training), way, 3.0)
    assert [float(weight) for weight in training.weights] == [1, 2]


@pytest.mark.graph
def test_clipping_the_argument_of_unscale_is_refused_in_a_graph(session: tf.compat.v1.Session) -> None:
    weight, optimizer, scaler = tf.compat.v1.get_variable("w", initializer=1.0), sgd(0.5), tfmp.GradScaler(1024.0)
    grads = tf.gradients(scaler.scale(weight * 2.0), [weight])
    (unscaled,) = scaler.unscale(optimizer, grads)
    with pytest.raises(RuntimeError, match=_SAYS_WHAT_TO_CLIP):
        scaler.step(optimizer, [(tf.clip_by_value(grads[0], -1.0, 1.0), weight)])
    scaler.step(optimizer, [(tf.clip_by_value(unscaled, -1.0, 1.0), weight)])
    update = scaler.update()
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(update)
    assert session.run(weight) == 0.5


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


@pytest.mark.parametrize("index", [0, 1])
def test_norm_and_largest_magnitude_are_of_both_parts(index: int) -> None:
    training = Training(tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager()))
    alone = tfmp.LogMaxLossScaleManager()
    training.scaler.record_gradient_norm()
    grads = [training.scaler.scale(tf.constant(value)) for value in (3.0, 4.0)]
    (unscaled,) = training.unscale([grads[index]])
    grads[index] = unscaled * 0.5
    training.step(grads)
    training.scaler.update()
    alone.update_loss_scale(tf.constant(True), tf.constant(4.0))
    assert (float(training.scaler.gradient_norm), training.scaler.state_dict()) == (5, alone.state_dict())


@IN_BOTH_WAYS
def test_norm_counts_gradients_once_that_are_unscaled_twice(way: str) -> None:
    training = Training()
    training.scaler.record_gradient_norm()

    def iterate(factor: tf.Tensor) -> None:
        grads = training.scaled(factor)
        training.step([training.unscale(grads)[0] * 0.5, grads[1]])

    for factor, norm in [(0.0, 1), (math.sqrt(3), 2)]:
        training.run(iterate, way, factor)
        assert float(training.scaler.gradient_norm) == pytest.approx(norm)


def test_update_forgets_the_gradients() -> None:
    training = Training()
    grads = training.scaled()
    training.unscale(grads)
    training.scaler.update()
    # In the next iteration they are gradients of a scaled loss like any others.
    training.step(grads)
    assert [float(weight) for weight in training.weights] == [0.5, 0.5]


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
