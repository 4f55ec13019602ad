"""Eager steps in every Keras, where an optimizer counts in Python or a user replaces its code: nothing is frozen."""

import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, optimizer, optimizer_names, variable

import tfmp
from tfmp.hosts.keras.programs.fingerprint import Fingerprint


class _Pair:
    """An optimizer that is wrapped and compiles, and a bare one, which take the same eager steps."""

    def __init__(self, keras: ModuleType, make: Callable[[], Any], constraint: Any = None) -> None:
        self.bare, self.inner = make(), make()
        self.opt = tfmp.LossScaleOptimizer(self.inner, tfmp.FixedLossScaleManager(SCALE), jit_compile=True)
        self.sides = [_weights(keras, constraint) for _ in range(2)]
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        rng = np.random.default_rng(self._steps)
        grads = [tf.constant(rng.normal(size=(3, 2)), tf.float32) for _ in range(2)]
        self.bare.apply_gradients(zip(grads, self.sides[0], strict=True))
        self.opt.scale_loss(tf.constant(1.0))
        self.opt.apply_gradients([(grad * SCALE, weight) for grad, weight in zip(grads, self.sides[1], strict=True)])

    def assert_equal(self) -> None:
        for one, other in zip(*self.sides, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)

    @property
    def num_programs(self) -> int:
        return len(self.opt._compilers.of(self.inner).programs)


def _weights(keras: ModuleType, constraint: Any) -> list[Any]:
    if not keras.__version__.startswith("3."):
        start = np.linspace(0.5, 2.0, 6, dtype=np.float32).reshape(3, 2)
        return [tf.Variable(start, name=name, constraint=constraint) for name in ("kernel", "other")]
    weights = [variable(keras, np.linspace(0.5, 2.0, 6).reshape(3, 2), name) for name in ("kernel", "other")]
    for weight in weights:
        weight.constraint = constraint
    return weights


@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 0.5}, {"weight_decay": 0.25}], ids="-".join)
@for_every_keras()
def test_nadam_takes_the_same_eager_steps(keras: ModuleType, options: dict[str, Any]) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, "Nadam", **{"learning_rate": 0.01} | options))
    for _ in range(6):
        pair.step()
    pair.assert_equal()


@for_every_keras("keras2", "tf_keras")
def test_nadam_in_functions_that_clip_counts_their_traces_as_the_bare_one(keras: ModuleType) -> None:
    def trained(wraps: bool) -> list[np.ndarray]:
        inner = optimizer(keras, "Nadam", global_clipnorm=0.5)
        opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1), jit_compile=True) if wraps else inner
        weights = _weights(keras, None)
        opt.build(weights)
        for number in range(1, 3):
            grads = [tf.fill([3, 2], float(number)), tf.fill([3, 2], -0.5)]
            tf.function(lambda grads: opt.apply_gradients(zip(grads, weights, strict=True)))(grads)
        return [weight.numpy() for weight in weights]

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-5)


@for_every_keras("keras2", "tf_keras")
def test_scaler_steps_with_nadam_as_it_does_alone(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, "Nadam"))
    scaler = tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(SCALE))
    for step in range(1, 6):
        grads = [tf.fill([3, 2], float(step)), tf.fill([3, 2], -0.5)]
        pair.bare.apply_gradients(zip(grads, pair.sides[0], strict=True))
        scaler.scale(tf.constant(1.0))
        scaler.step(pair.inner, [(grad * SCALE, own) for grad, own in zip(grads, pair.sides[1], strict=True)])
        scaler.update()
    pair.assert_equal()


@for_every_keras()
def test_only_nadam_of_keras_2_counts_in_python(keras: ModuleType) -> None:
    counting = []
    for name in optimizer_names(keras):
        opt, weights = optimizer(keras, name), _weights(keras, None)
        opt.build(weights)
        keys = []
        for _ in range(3):
            opt.apply_gradients([(tf.ones([3, 2]), weight) for weight in weights])
            keys.append(Fingerprint([opt]).key)
        counting += [name] if keys[1] != keys[2] else []
        assert Fingerprint([opt]).is_complete
    assert counting == ([] if keras.__version__.startswith("3.") else ["Nadam"])


@for_every_keras()
def test_ordinary_optimizers_are_compiled_after_two_steps(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, "Adam", global_clipnorm=0.5))
    assert [(pair.step(), pair.num_programs)[1] for _ in range(3)] == [0, 1, 1]
    pair.assert_equal()


def _update_step(self: Any, gradient: Any, variable: Any, *rate: Any) -> Any:
    self.calls = getattr(self, "calls", 0) + 1
    return type(self).plain_update_step(self, gradient * float(self.calls), variable, *rate)


def _on_object(pair: _Pair, _: pytest.MonkeyPatch) -> None:
    for opt in (pair.bare, pair.inner):
        opt.update_step = types.MethodType(_update_step, opt)


def _on_class(pair: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(pair.inner), "update_step", _update_step)


def _clipping_of_base_class(pair: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    base = next(each for each in type(pair.inner).__mro__ if "_clip_gradients" in vars(each))
    monkeypatch.setattr(base, "_clip_gradients", lambda self, grads: [tf.sign(grad) for grad in grads])


def _property(pair: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(pair.inner), "learning_rate", property(lambda self: tf.constant(0.125)))


def _schedule(pair: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(pair.inner._learning_rate), "__call__", lambda self, step: tf.constant(0.125))


def _constraint(pair: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(pair.sides[0][0].constraint), "__call__", lambda self, weight: weight * 0.5)


@pytest.mark.parametrize("compiled_before", [True, False])
@pytest.mark.parametrize("replace", [_on_object, _on_class, _clipping_of_base_class, _property, _schedule, _constraint])
@for_every_keras()
def test_what_a_user_puts_in_place_of_keras_code_runs_at_each_step(
    keras: ModuleType,
    replace: Callable[[_Pair, pytest.MonkeyPatch], None],
    compiled_before: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Any:
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5))

    monkeypatch.setattr(keras.optimizers.SGD, "plain_update_step", keras.optimizers.SGD.update_step, raising=False)
    pair = _Pair(keras, make, keras.constraints.MaxNorm(4.0))
    if compiled_before:
        for _ in range(2):
            pair.step()
    assert pair.num_programs == compiled_before
    replace(pair, monkeypatch)
    for _ in range(3):
        pair.step()
        pair.assert_equal()
    assert pair.num_programs == compiled_before


class _Factor:
    """A number of the user's own that changes where no fingerprint sees it."""

    def __init__(self) -> None:
        self.value = 1.0

    def __mul__(self, other: Any) -> Any:
        return other * self.value

    __rmul__ = __mul__


@for_every_keras("keras3")
def test_attribute_that_may_change_unseen_is_read_at_each_step(keras: ModuleType) -> None:
    pair = _Pair(keras, lambda: optimizer(keras, momentum=0.5))
    factors = _Factor(), _Factor()
    for each, factor in zip((pair.bare, pair.inner), factors, strict=True):
        each.own_factor = factor
    for value in (1.0, 0.5, 0.25):
        for factor in factors:
            factor.value = value
        pair.step()
    assert pair.num_programs == 0
    pair.assert_equal()
