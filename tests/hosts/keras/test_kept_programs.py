"""Eager steps of every Keras: the compiled program that is kept obeys all that may change, and keeps nothing alive."""

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, optimizer, variable
from pairs import Pair

import tfmp


class _Pair(Pair):
    """A pair that takes the same eager steps."""

    def __init__(
        self, keras: ModuleType, make: Callable[[], Any], constraint: Callable[[], Any] = lambda: None
    ) -> None:
        super().__init__(make, lambda: _weights(keras, constraint))
        self._steps = 0

    def step(self) -> bool:
        """Take a step; return whether Keras' code ran in Python, as it does not where a program is kept."""
        self._steps += 1
        rng = np.random.default_rng(self._steps)
        grads = [tf.constant(rng.normal(size=(3, 2)), tf.float32) for _ in range(2)]
        self.apply_bare(grads)
        called = set()
        sys.setprofile(lambda frame, event, arg: called.add(frame.f_code.co_name))
        try:
            self.apply(grads)
        finally:
            sys.setprofile(None)
        return "update_step" in called

    def steps(self, count: int) -> list[bool]:
        return [self.step() for _ in range(count)]

    def change(self, change: Callable[..., object], *arguments: Any) -> None:
        change(self.bare, self.bare_variables, *arguments)
        change(self.inner, self.variables, *arguments)


def _weights(keras: ModuleType, constraint: Callable[[], Any]) -> list[Any]:
    start = np.linspace(0.5, 2.0, 6, dtype=np.float32).reshape(3, 2)
    if keras.__version__.startswith("2."):
        return [tf.Variable(start, name="kernel", constraint=constraint()), tf.Variable(start, name="bias")]
    weights = [variable(keras, start), variable(keras, start, "bias")]
    weights[0].constraint = constraint()
    return weights


@for_every_keras()
def test_program_is_made_once_for_settings_that_stay_whatever_the_learning_rate(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, "Adam", global_clipnorm=0.5))
    ran = []
    for rate in (0.5, 0.25, 0.125, 0.0625):
        pair.bare.learning_rate = rate
        pair.opt.learning_rate = rate
        ran.append(pair.step())
    # The first step is not compiled, and the second is traced.
    assert ran == [True, True, False, False]
    pair.assert_alike(1e-4, 1e-5)


_OPTIONS = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2, "weight_decay": 0.25, "clipvalue": 4.0}
#: The attributes that Keras itself does not let change between two steps: what they need is made when it is built.
_FIXED = {"use_ema", "gradient_accumulation_steps", "built", "amsgrad", "centered", "rms_scaling", "optimizers"}


def _changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}_changed"
    return 0.25 if value is None else value / 2 if isinstance(value, float) else value + 1


def _set(opt: Any, _: Any, attribute: str, value: Any) -> None:
    setattr(opt, attribute, value)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Ftrl"])
@for_every_keras("keras3")
def test_every_attribute_that_changes_between_steps_is_obeyed(keras: ModuleType, name: str) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, name, **_OPTIONS))
    assert pair.steps(4)[-1] is False
    attributes = {each: value for each, value in vars(pair.inner).items() if each[0] != "_" and each not in _FIXED}
    assert {"weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "ema_momentum"} <= attributes.keys()
    for attribute, value in sorted(attributes.items()):
        # A momentum of 0 has no slots, and cannot be another one.
        if isinstance(value, str | bool | int | float | None) and _changed(value) != value:
            # With a setting that is new, Keras' code runs; with the one before, the program that was kept.
            pair.change(_set, attribute, _changed(value))
            assert pair.step()
            pair.change(_set, attribute, value)
            assert not pair.step()
            pair.assert_alike(1e-4, 1e-5)


def _momentum(opt: Any, _: Any, value: float) -> None:
    opt.momentum = value


def _own_factor(opt: Any, _: Any, value: float) -> None:
    # An object of a class that is not Keras' may change where no fingerprint sees it.
    vars(opt).setdefault("own_factor", types.SimpleNamespace()).value = value


def _own_schedule(opt: Any, _: Any, value: float) -> None:
    type(opt._learning_rate).rate = value


@pytest.mark.parametrize("change", [_momentum, _own_factor, _own_schedule])
@for_every_keras()
def test_settings_that_change_at_each_step_or_may_change_unseen_are_obeyed_without_compiling(
    keras: ModuleType, change: Callable[..., None]
) -> None:
    schedule = keras.optimizers.schedules.LearningRateSchedule
    own = type("Own", (schedule,), {"rate": 0.5, "__call__": lambda self, step: self.rate})
    pair = _Pair(keras, lambda: optimizer(keras, learning_rate=own() if change is _own_schedule else 0.5, momentum=0.5))
    for step in range(6):
        pair.change(change, 0.5 + step / 100)
        assert pair.step()
        pair.assert_alike(1e-4, 1e-5)


def _replace_schedule(keras: ModuleType, opt: Any, _: Any) -> None:
    opt.learning_rate = keras.optimizers.schedules.PolynomialDecay(0.25, 10)


#: What changes the settings of an optimizer or of what it refers to.
_CHANGES: dict[str, Callable[[ModuleType, Any, list[Any]], object]] = {
    "another schedule": _replace_schedule,
    "schedule": lambda keras, opt, _: setattr(opt._learning_rate, "decay_rate", 0.125),
    "constraint": lambda keras, opt, weights: setattr(weights[0].constraint, "max_value", 0.5),
    "another constraint": lambda keras, opt, weights: setattr(weights[0], "constraint", keras.constraints.NonNeg()),
    "excluded by name": lambda keras, opt, _: opt.exclude_from_weight_decay(var_names=["bias"]),
    "inside a MultiOptimizer": lambda keras, opt, _: setattr(opt.optimizers[0], "momentum", 0.25),
    "excluded": lambda keras, opt, weights: opt.exclude_from_weight_decay(var_list=weights[:1]),
}


@pytest.mark.parametrize("change", _CHANGES)
@for_every_keras("keras3")
def test_what_an_optimizer_refers_to_is_obeyed(keras: ModuleType, change: str) -> None:
    def make() -> Any:
        name = "MultiOptimizer" if "MultiOptimizer" in change else "SGD"
        schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
        return optimizer(keras, name, learning_rate=schedule, weight_decay=0.25)

    pair = _Pair(keras, make, lambda: keras.constraints.MaxNorm(1.0))
    # The first step makes notes, such as of what decays, which are settings too.
    assert pair.steps(4)[-1] is False
    pair.change(functools.partial(_CHANGES[change], keras))
    assert pair.step()
    pair.assert_alike(1e-4, 1e-5)


#: How often each optimizer called what is put in the place of its method; no setting of the optimizer tells.
_CALLS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _update_step(self: Any, gradient: Any, variable: Any, *rate: Any) -> Any:
    _CALLS[self] = _CALLS.get(self, 0) + 1
    return type(self).plain_update_step(self, gradient * float(_CALLS[self]), variable, *rate)


def _on_object(pair: _Pair, method: Callable[[Any], Any]) -> None:
    for opt in (pair.bare, pair.inner):
        opt.update_step = method(opt)


def _pretending(sgd: type) -> Any:
    @functools.wraps(sgd.update_step)
    def pretends_to_be_keras_own(*args: Any) -> Any:
        return _update_step(*args)

    return pretends_to_be_keras_own


def _rate(pair: _Pair, patch: pytest.MonkeyPatch, value: Any) -> None:
    patch.setattr(type(pair.inner._learning_rate), "__call__", value)


def _clips(pair: _Pair, patch: pytest.MonkeyPatch) -> None:
    base = next(each for each in type(pair.inner).__mro__ if "_clip_gradients" in vars(each))
    patch.setattr(base, "_clip_gradients", lambda self, grads: [tf.sign(grad) for grad in grads])


_KERAS_OWN = "a method of another class of Keras"
#: What is put in the place of Keras' code, on an optimizer, on its class or a base class, or on what it refers to.
_REPLACEMENTS: dict[str, Callable[[_Pair, pytest.MonkeyPatch, ModuleType], object]] = {
    "method": lambda pair, patch, keras: _on_object(pair, lambda opt: types.MethodType(_update_step, opt)),
    "partial": lambda pair, patch, keras: _on_object(pair, lambda opt: functools.partial(_update_step, opt)),
    "class": lambda pair, patch, keras: patch.setattr(type(pair.inner), "update_step", _pretending(type(pair.inner))),
    "base class": lambda pair, patch, keras: _clips(pair, patch),
    "property": lambda pair, patch, keras: patch.setattr(
        type(pair.inner), "learning_rate", property(lambda self: tf.constant(0.125))
    ),
    "schedule": lambda pair, patch, keras: _rate(pair, patch, lambda self, step: tf.constant(0.125)),
    "static method": lambda pair, patch, keras: _rate(pair, patch, staticmethod(lambda step: tf.constant(0.125))),
    "function of TensorFlow": lambda pair, patch, keras: _rate(
        pair, patch, tf.function(lambda self, step: tf.constant(0.125), autograph=False)
    ),
    "constraint": lambda pair, patch, keras: patch.setattr(
        type(pair.bare_variables[0].constraint), "__call__", lambda self, weight: weight * 0.5
    ),
    _KERAS_OWN: lambda pair, patch, keras: _rate(pair, patch, keras.optimizers.schedules.InverseTimeDecay.__call__),
}


@pytest.mark.parametrize("replace", _REPLACEMENTS)
@for_every_keras()
def test_what_a_user_puts_in_place_of_keras_code_runs_at_each_step(
    keras: ModuleType, replace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5))

    monkeypatch.setattr(keras.optimizers.SGD, "plain_update_step", keras.optimizers.SGD.update_step, raising=False)
    pair = _Pair(keras, make, lambda: keras.constraints.MaxNorm(4.0))
    assert pair.steps(3) == [True, True, False]
    _REPLACEMENTS[replace](pair, monkeypatch, keras)
    for _ in range(3):
        ran = pair.step()
        pair.assert_alike(1e-4, 1e-5)
    # What is Keras' own is compiled anew.
    assert ran is (replace != _KERAS_OWN)


@for_every_keras("keras2", "tf_keras")
def test_nadam_in_functions_that_clip_counts_their_traces_as_the_bare_one(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, "Nadam", global_clipnorm=0.5))
    for number in range(1, 3):
        grads = [tf.fill([3, 2], float(number)), tf.fill([3, 2], -0.5)]
        for apply in (pair.apply, pair.apply_bare):
            tf.function(apply)(grads)
    pair.assert_alike()


@for_every_keras("keras3")
def test_programs_keep_neither_the_optimizer_nor_its_variables_nor_their_graphs_alive(keras: ModuleType) -> None:
    def graphs() -> int:
        gc.collect()
        return sum(type(each).__name__ == "FuncGraph" for each in gc.get_objects())

    scaler = tfmp.GradScaler(SCALE, jit_compile=True)

    def train() -> list[Any]:
        # Not the bare optimizer: in a function TensorFlow would keep its graph.
        pair = _Pair(keras, lambda: optimizer(keras, "Adam", global_clipnorm=0.5))
        assert pair.steps(3) == [True, True, False]
        tf.function(pair.opt.apply)([tf.ones([3, 2])] * 2)
        kept = [pair.inner, pair.opt, *pair.variables, *(each.value for each in pair.inner.variables)]
        other = optimizer(keras, "Adam")
        for _ in range(2):
            scaler.scale(tf.constant(1.0))
            scaler.step(other, [(tf.ones([2]), weight)])
            scaler.update()
        return [weakref.ref(each) for each in [*kept, other]]

    weight = variable(keras, [1.0, 2.0])
    references = train()
    before = graphs()
    assert {reference() for reference in references} == {None}
    train()
    assert graphs() == before


@for_every_keras()
def test_a_tape_around_a_step_changes_nothing(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, "Adam"))
    with tf.GradientTape(persistent=True):
        pair.steps(3)
    pair.assert_alike(1e-4, 1e-5)


@for_every_keras("keras3")
def test_the_programs_used_last_are_kept(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras))
    assert pair.steps(3) == [True, True, False]
    for number in range(15):
        pair.change(_set, "clipvalue", 1.0 + number)
        assert pair.step()
    for clipvalue, runs_python in [(None, False), (20.0, True), (None, False), (1.0, True)]:
        pair.change(_set, "clipvalue", clipvalue)
        assert pair.step() is runs_python
    pair.assert_alike(1e-4, 1e-5)


@for_every_keras("keras3")
def test_setting_that_takes_the_place_of_one_that_is_gone_is_another_one(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras), lambda: keras.constraints.MaxNorm(1.0))
    weight = pair.variables[0]
    assert pair.steps(3) == [True, True, False]
    gone, others = id(weight.constraint), []
    weight.constraint = None
    gc.collect()
    # CPython makes objects where others were that are gone.
    while not others or (id(others[-1]) != gone and len(others) < 1000):
        others.append(keras.constraints.MaxNorm(1.0))
    weight.constraint = others[-1]
    assert pair.step()
    pair.assert_alike(1e-4, 1e-5)
