"""Programs of a `GradScaler`'s calls, against a model of what docs/howto/grad_scaler.md says of them.

A program is a list of iterations, in which two optimizers train two weights each. It runs in eager code, in functions
whose branches are in a `tf.cond`, and in a graph. The model says what becomes of the weights, the scale and the counts,
and which calls are refused; a call that is refused changes nothing.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import kerases
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp

tf1 = tf.compat.v1

_INIT_SCALE, _NEW_SCALE, _LOADED = 8.0, 64.0, {"loss_scale": 32.0, "good_steps": 1, "bad_steps": 0}
_GROWTH_INTERVAL, _CLIP = 3, 0.5

_STEPPED = "step was called already for this optimizer"
_STEPPED_TWICE = rf"{_STEPPED} .*: call update\(\) once after all optimizers have stepped"
_UNSCALED_TOO_LATE = rf"{_STEPPED} .*: unscale comes before step; call update\(\) once"
_UNSCALED_TWICE = "unscale was called already for this optimizer .* with these gradients.* Unscale each gradient once"
_NOTHING = "no optimizer has stepped since the last update: call step first|update was built before any step"


class _RefusedError(Exception):
    """The model refuses a call, with this message."""


class _Call(NamedTuple):
    """A call of `unscale` for some of an optimizer's weights; or of `step`, of `step_all` if there are two optimizers.

    `step` passes the results of `unscale` as they are, clipped, or in place of them the gradients that `unscale` got.
    """

    verb: str
    optimizers: tuple[int, ...] = (0,)
    group: tuple[int, ...] = (0, 1)
    passes: str = "results"

    @property
    def weights(self) -> list[int]:
        return [2 * optimizer + index for optimizer in self.optimizers for index in self.group]


class _Iteration(NamedTuple):
    """An iteration with these gradients, in true magnitude, that runs once for each flag.

    `before` is called first, then `yes` or `no` by the flag. `end` is "update", "set" (an update with a new scale) or
    "abandon"; it is in the function if there is one, or after it: in eager code, or in a function of its own. `then` is
    "", "copy" or "load".
    """

    grads: tuple[float, ...] = (1.0,) * 4
    before: Sequence[_Call] = ()
    yes: Sequence[_Call] = ()
    no: Sequence[_Call] = ()
    flags: Sequence[bool] = (True,)
    end: str = "update"
    where: str = "inside"
    then: str = ""

    def path(self, flag: bool) -> list[_Call]:
        return [*self.before, *(self.yes if flag else self.no)]


class _Model:
    """What the page promises, for optimizers that subtract their gradients."""

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.scale, self.good = enabled, _INIT_SCALE if enabled else 1.0, 0
        self.weights, self.applied, self.skipped, self.in_a_row = np.zeros(4), 0, 0, 0
        self.begin()

    def begin(self, grads: Sequence[float] = (1.0,) * 4) -> None:
        self.grads, self.unscaled, self.stepped = np.array(grads), set[int](), set[int]()
        self.finite, self.any_applied = True, False

    def call(self, call: _Call) -> None:
        if self.enabled and self.stepped.intersection(call.optimizers):
            raise _RefusedError(_STEPPED_TWICE if call.verb == "step" else _UNSCALED_TOO_LATE)
        if call.verb == "unscale" and self.enabled and self.unscaled.intersection(call.weights):
            raise _RefusedError(_UNSCALED_TWICE)
        finite = bool(np.isfinite(self.grads[call.weights]).all())
        # What `unscale` finds counts too, though the step be dropped.
        self.finite &= finite
        if call.verb == "unscale":
            self.unscaled.update(call.weights)
            return
        self.stepped.update(call.optimizers)
        if finite or not self.enabled:
            self.any_applied = True
            for index in call.weights:
                clips = call.passes == "clipped" and index in self.unscaled
                self.weights[index] -= np.clip(self.grads[index], -_CLIP, _CLIP) if clips else self.grads[index]

    def end(self, end: str) -> None:
        has_calls, is_step = bool(self.unscaled or self.stepped), self.any_applied or not self.finite
        if self.enabled and not has_calls and end == "update":
            raise _RefusedError(_NOTHING)
        if self.enabled and (has_calls or end == "set"):
            if end == "set":
                self.scale = _NEW_SCALE
            else:
                self.good = (self.good + 1) % _GROWTH_INTERVAL if self.finite else 0
                self.scale = max(1.0, self.scale / 2) if not self.finite else self.scale * (1 if self.good else 2)
            # Of an iteration that is given up, only an overflow is counted.
            self.applied += is_step and self.finite and end != "abandon"
            self.skipped += is_step and not self.finite
            if is_step and not (self.finite and end == "abandon"):
                self.in_a_row = 0 if self.finite else self.in_a_row + 1
        self.begin()

    def load(self) -> None:
        if self.enabled:
            self.scale, self.good = _LOADED["loss_scale"], int(_LOADED["good_steps"])

    def told(self) -> list[float]:
        counts = [self.applied + self.skipped, self.applied, self.skipped, self.in_a_row, self.in_a_row == 0]
        return [*self.weights, self.scale, *counts]


class _Training:
    def __init__(self, enabled: bool, in_graph: bool = False) -> None:
        self.scaler: Any = tfmp.GradScaler(_INIT_SCALE, growth_interval=_GROWTH_INTERVAL, enabled=enabled)
        self.weights = [tf.Variable(0.0, name=f"weight{index}") for index in range(4)]
        keras = None if in_graph else next(iter(kerases.installed().values()), None)
        self.optimizers = [tf1.train.GradientDescentOptimizer(1.0)]
        self.optimizers.append(keras.optimizers.SGD(1.0) if keras else tf1.train.GradientDescentOptimizer(1.0))
        self.scaler.prepare(self.optimizers[1], self.weights[2:])

    def begin(self, grads: Sequence[float]) -> None:
        self._scaled = [self.scaler.scale(tf.constant(grad)) for grad in grads]
        self._results: dict[int, tf.Tensor] = {}

    def call(self, call: _Call) -> None:
        if call.verb == "unscale":
            (optimizer,) = call.optimizers
            results = self.scaler.unscale(self.optimizers[optimizer], [self._scaled[index] for index in call.weights])
            self._results.update(zip(call.weights, results, strict=True))
            return
        passed = dict(enumerate(self._scaled)) | (self._results if call.passes != "arguments" else {})
        if call.passes == "clipped":
            passed |= {index: tf.clip_by_value(each, -_CLIP, _CLIP) for index, each in self._results.items()}
        if not self.scaler.enabled:
            # The optimizer gets them as they are, and Keras refuses gradients of two graphs.
            passed = {index: tf.identity(each) for index, each in passed.items()}
        steps = [
            (self.optimizers[each], [(passed[index], self.weights[index]) for index in (2 * each, 2 * each + 1)])
            for each in call.optimizers
        ]
        if len(steps) == 1:
            self.scaler.step(*steps[0])
        else:
            self.scaler.step_all(steps)

    def branch(self, calls: Sequence[_Call]) -> Callable[[], tf.Tensor]:
        def of_branch() -> tf.Tensor:
            around, self._results = self._results, dict(self._results)
            for call in calls:
                self.call(call)
            self._results = around
            return tf.constant(0)

        return of_branch

    def end(self, end: str) -> Any:
        return self.scaler.update(_NEW_SCALE) if end == "set" else getattr(self.scaler, end)()

    def go_on(self, then: str, model: _Model) -> None:
        if then == "copy":
            self.scaler = copy.deepcopy(self.scaler)
        if then == "load":
            self.scaler.load_state_dict(_LOADED)
            model.load()
        if model.enabled:
            assert self.scaler.state_dict() == {"loss_scale": model.scale, "good_steps": model.good, "bad_steps": 0}

    def told(self) -> list[Any]:
        scaler = self.scaler
        counts = [scaler.attempted_steps, scaler.applied_steps, scaler.skipped_steps, scaler.consecutive_skipped_steps]
        return [*self.weights, scaler.loss_scale, *counts, scaler.last_step_applied]


@contextlib.contextmanager
def _as_in(model: _Model, verb: str, argument: Any) -> Iterator[None]:
    """Do within what a method of the model does, and expect the error if the model refuses it."""
    try:
        getattr(model, verb)(argument)
    except _RefusedError as refused:
        with pytest.raises((RuntimeError, tf.errors.InvalidArgumentError), match=str(refused)):
            yield
    else:
        yield


def _refused(model: _Model, calls: Sequence[_Call]) -> str | None:
    """Return the message of the first of these calls that a copy of the model refuses."""
    trial = copy.deepcopy(model)
    try:
        for call in calls:
            trial.call(call)
    except _RefusedError as refused:
        return str(refused)
    return None


def _assert_same(told: Sequence[Any], model: _Model) -> None:
    np.testing.assert_array_equal([float(each) for each in told], model.told())


def _run_eagerly(program: Sequence[_Iteration], enabled: bool = True) -> None:
    model, training = _Model(enabled), _Training(enabled)
    for iteration in program:
        for flag in iteration.flags:
            for each in (model, training):
                each.begin(iteration.grads)
            for call in iteration.path(flag):
                with _as_in(model, "call", call):
                    training.call(call)
                _assert_same(training.told(), model)
            with _as_in(model, "end", iteration.end):
                training.end(iteration.end)
            _assert_same(training.told(), model)
        training.go_on(iteration.then, model)


def _run_in_functions(program: Sequence[_Iteration], enabled: bool = True) -> None:
    model, training = _Model(enabled), _Training(enabled)
    for iteration in program:
        _run_in_a_function(iteration, model, training)
        training.go_on(iteration.then, model)


def _run_in_a_function(iteration: _Iteration, model: _Model, training: _Training) -> None:
    @tf.function(autograph=False)
    def iterate(flag: tf.Tensor) -> None:
        training.begin(iteration.grads)
        for call in iteration.before:
            training.call(call)
        if iteration.yes or iteration.no:
            tf.cond(flag, training.branch(iteration.yes), training.branch(iteration.no))
        if iteration.where == "inside":
            training.end(iteration.end)

    @tf.function(autograph=False)
    def end() -> None:
        training.end(iteration.end)

    # A branch that is out of order is refused when the function is traced, whichever branch is taken.
    message = _refused(model, iteration.path(True)) or _refused(model, iteration.path(False))
    if message is not None:
        with pytest.raises(RuntimeError, match=message):
            iterate(tf.constant(iteration.flags[0]))
        training.scaler.abandon()
        _assert_same(training.told(), model)
        return
    for flag in iteration.flags:
        model.begin(iteration.grads)
        for call in iteration.path(flag):
            model.call(call)
        if iteration.where != "inside":
            iterate(tf.constant(flag))
        with _as_in(model, "end", iteration.end):
            if iteration.where == "inside":
                iterate(tf.constant(flag))
            elif iteration.where == "after":
                training.end(iteration.end)
            else:
                end()
        _assert_same(training.told(), model)


def _run_in_a_graph(program: Sequence[_Iteration], enabled: bool = True) -> None:
    # Only one path of each iteration is built, and none is given up.
    program = [each._replace(end="update") if each.end == "abandon" else each for each in program]
    with tf.Graph().as_default(), tf1.Session() as session:
        model, training, built = _Model(enabled), _Training(enabled, in_graph=True), []
        for iteration in program:
            trial = _Model(enabled)
            for each in (trial, training):
                each.begin(iteration.grads)
            calls = []
            for call in iteration.path(iteration.flags[0]):
                calls += [call] * (_refused(trial, [call]) is None)
                with _as_in(trial, "call", call):
                    training.call(call)
            with _as_in(trial, "end", iteration.end):
                built.append((iteration, calls, training.end(iteration.end)))
        nothing_left, told = training.end("abandon"), training.told()
        session.run(tf1.global_variables_initializer())
        for iteration, calls, update in built:
            for _ in iteration.flags:
                model.begin(iteration.grads)
                for call in calls:
                    model.call(call)
                model.end(iteration.end)
                session.run(update)
                session.run(nothing_left)
                _assert_same(session.run(told), model)


_WAYS = {"eager": _run_eagerly, "function": _run_in_functions, "graph": _run_in_a_graph}


def _unscale(optimizer: int = 0, *group: int) -> _Call:
    return _Call("unscale", (optimizer,), group or (0, 1))


def _step(*optimizers: int, passes: str = "results") -> _Call:
    return _Call("step", optimizers or (0,), passes=passes)


_INF, _NAN = (1.0, math.inf, 1.0, 1.0), (math.nan, 1.0, 1.0, 1.0)
_BOTH = (True, False)

#: What the page says, and faults that were found.
_PROGRAMS: dict[str, list[_Iteration]] = {
    "step unscales by itself, and the scale falls and grows": [
        _Iteration(grads, [_step()]) for grads in (_INF, (1.0,) * 4, (-2.0,) * 4, (1.0,) * 4, _NAN)
    ],
    "clipping hides no overflow": [
        _Iteration(grads, [_unscale(), _step(passes="clipped")]) for grads in (_INF, _NAN, (1.0,) * 4)
    ],
    "each group is unscaled and clipped by itself": [
        _Iteration(grads, [_unscale(0, 0), _unscale(0, 1), _step(passes="clipped")]) for grads in ((2.0,) * 4, _INF)
    ],
    "only the clipped group is unscaled": [
        _Iteration(grads, [_unscale(0, index), _step(passes="clipped")])
        for index in (0, 1)
        for grads in ((2.0,) * 4, _INF)
    ],
    "gradients that unscale got are unscaled by step": [_Iteration(before=[_unscale(), _step(passes="arguments")])],
    "groups do not overlap": [_Iteration(before=[_unscale(0, 0), _unscale(), _step()])],
    "a dropped step counts by what unscale found": [
        *(_Iteration(grads, [_unscale()]) for grads in (_INF, (1.0,) * 4)),
        _Iteration(before=[_step()]),
        *(_Iteration(before=[_unscale()]) for _ in range(2)),
    ],
    "an iteration is applied if one optimizer steps and nothing overflowed": [
        _Iteration(grads, [_unscale(), _step(1)]) for grads in ((1.0,) * 4, _INF)
    ],
    "step lets each optimizer decide for itself": [_Iteration(_INF, [_step(0), _step(1)])],
    "step_all lets all optimizers step or none": [
        _Iteration(grads, [*calls, _step(0, 1)])
        for calls in ([], [_unscale()], [_unscale(1, 1)])
        for grads in (_INF, (1.0,) * 4)
    ],
    "calls are refused after step, and a second unscale and step": [
        _Iteration(before=calls)
        for calls in ([_step(), _unscale()], [_step(), _step()], [_unscale(), _unscale()], [_step(1), _step(0, 1)])
    ],
    "update needs a call": [
        _Iteration(),
        *(_Iteration(where=where) for where in ("after", "own function")),
        _Iteration(before=[_step()]),
        _Iteration(),
    ],
    "a branch may drop the step": [_Iteration(before=[_unscale()], yes=[_step()], flags=(*_BOTH, True))],
    "a branch may drop all calls": [_Iteration(yes=[_unscale(), _step()], flags=_BOTH, where="after")],
    "gradients are divided once in whichever branch steps": [
        _Iteration(before=[_unscale()], yes=[_step(passes="clipped")], no=[_step()], flags=_BOTH),
        _Iteration(yes=[_unscale(), _step(passes="clipped")], no=[_step()], flags=_BOTH),
    ],
    # It was refused in a function: `step` took the other branch's `unscale` for one outside of the function.
    "one branch unscales and drops its step, the other steps": [
        _Iteration(yes=[_unscale()], no=[_step()], flags=_BOTH)
    ],
    # Random programs alone do not find it.
    "unscale around a conditional and again in it": [_Iteration(before=[_unscale()], yes=[_unscale(), _step()])],
    "step around a conditional and again in it": [_Iteration(before=[_step()], yes=[_step()])],
    "a function is called again": [
        _Iteration(grads, [_unscale(), _step()], flags=(True,) * 3, where=where)
        for grads in (_INF, (1.0,) * 4)
        for where in ("inside", "after", "own function")
    ],
    "an iteration is given up": [
        _Iteration(grads, calls, end="abandon", where=where)
        for calls in ([], [_unscale()], [_step()], [_unscale(), _step()], [_step(1), _step()], [_unscale(), _step(1)])
        for grads, where in ((_NAN, "after"), ((1.0,) * 4, "inside"))
    ],
    "a new scale replaces what was found": [
        _Iteration(grads, calls, end="set") for calls in ([_unscale()], [_step()], []) for grads in (_INF, (1.0,) * 4)
    ],
    "the state goes on in a copy, and from a dictionary": [
        _Iteration(_INF, [_step(), _step(1)], then="copy"),
        _Iteration(before=[_step(), _step(1)], then="load"),
        *(_Iteration(before=[_unscale(), _step()], then="copy") for _ in range(3)),
    ],
}


#: A graph has no conditional, and no op that runs only the calls of an iteration that is given up.
_IN_GRAPHS = [
    name
    for name, program in _PROGRAMS.items()
    if not any(each.end == "abandon" or len(set(each.flags)) > 1 for each in program)
]


@pytest.mark.promise(9, 16)
@pytest.mark.parametrize(
    ("program", "way"),
    [
        *((program, way) for program in _PROGRAMS for way in ("eager", "function")),
        *(pytest.param(program, "graph", marks=pytest.mark.graph) for program in _IN_GRAPHS),
    ],
)
def test_calls_do_what_the_page_says(program: str, way: str) -> None:
    _WAYS[way](_PROGRAMS[program])


_GRADS = st.tuples(*[st.sampled_from([1.0, 1.0, -2.0, 1.0, math.inf, math.nan])] * 4)
_UNSCALES = st.builds(_unscale, st.integers(0, 1)) | st.builds(_unscale, st.integers(0, 1), st.integers(0, 1))
_STEPS = st.builds(
    lambda optimizers, passes: _step(*optimizers, passes=passes),
    st.sampled_from([(0,), (1,), (0, 1)]),
    st.sampled_from(["results", "clipped", "arguments"]),
)
_CALLS = st.lists(_UNSCALES | _STEPS, max_size=3)
_ITERATIONS = st.builds(
    _Iteration,
    _GRADS,
    *[_CALLS] * 3,
    flags=st.lists(st.booleans(), min_size=1, max_size=2),
    end=st.sampled_from(["update", "update", "set", "abandon"]),
    where=st.sampled_from(["inside", "inside", "after", "own function"]),
    then=st.sampled_from(["", "", "copy", "load"]),
)


@pytest.mark.promise(1, 2, 3, 5, 6, 9, 16)
@pytest.mark.parametrize("way", ["eager", "function", pytest.param("graph", marks=pytest.mark.graph)])
def test_random_calls_do_what_the_page_says(way: str) -> None:
    @settings(max_examples={"eager": 25, "function": 10, "graph": 5}[way])
    @given(st.lists(_ITERATIONS, min_size=1, max_size=4), st.sampled_from([True, True, True, False]))
    def run(program: list[_Iteration], enabled: bool) -> None:
        _WAYS[way](program, enabled)

    run()
