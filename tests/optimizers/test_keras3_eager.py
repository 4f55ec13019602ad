"""Eager steps of Keras 3: the compiled program that is kept obeys every setting, and keeps nothing alive."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, optimizer, optimizer_names, variable

import tfmp
from tfmp.hosts.keras.programs import kept_programs
from tfmp.hosts.keras.programs.kept_programs import KeptPrograms

pytestmark = pytest.mark.essential

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

_OPTIONS = {
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 2,
    "weight_decay": 0.25,
    "clipvalue": 4.0,
}


class _Pair:
    """An optimizer that is wrapped and compiles, and a bare one, which take the same eager steps."""

    def __init__(self, make: Callable[[], Any], constraint: Callable[[], Any] = lambda: None) -> None:
        self.bare, self.inner = make(), make()
        self.wrapped = tfmp.LossScaleOptimizer(self.inner, tfmp.FixedLossScaleManager(SCALE), jit_compile=True)
        self.wrapped.scale_loss(tf.constant(1.0))
        self.bare_variables, self.variables = ([_kernel(constraint()), _kernel(None, "bias")] for _ in range(2))
        self.bare.build(self.bare_variables)
        self.wrapped.build(self.variables)
        self.steps = 0

    @property
    def programs(self) -> KeptPrograms:
        return self.wrapped._compilers.of(self.inner).programs

    def step(self) -> None:
        self.steps += 1
        grads = [tf.constant(np.random.default_rng(self.steps).normal(size=(3, 2)), tf.float32) for _ in range(2)]
        self.bare.apply(grads, self.bare_variables)
        self.wrapped.apply([grad * SCALE for grad in grads], self.variables)

    def steps_to_compile(self) -> None:
        """Take steps until settings that stay are compiled: the first ones make notes, such as of what decays."""
        for _ in range(3):
            self.step()

    def assert_equal(self) -> None:
        for own, other in zip(self.variables, self.bare_variables, strict=True):
            np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def _kernel(constraint: Any, name: str = "kernel") -> Any:
    kernel = variable(keras, np.linspace(0.5, 2.0, 6).reshape(3, 2), name)
    kernel.constraint = constraint
    return kernel


def _public(opt: Any) -> set[str]:
    return {attribute for attribute in vars(opt) if not attribute.startswith("_")}


def _changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}_changed"
    return 0.25 if value is None else value / 2 if isinstance(value, float) else value + 1


#: The attributes that Keras itself does not let change between two steps: what they need is made when it is built.
_FIXED = {"use_ema", "gradient_accumulation_steps", "built", "amsgrad", "centered", "rms_scaling", "optimizers"}


@pytest.fixture
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_programs, "_FREE_PROGRAMS", 1000)


@pytest.mark.usefixtures("_unlimited")
@pytest.mark.parametrize("name", [name for name in optimizer_names(keras) if name != "MultiOptimizer"])
@pytest.mark.essential("Adam", "AdamW", "SGD")
def test_every_attribute_that_changes_between_steps_is_obeyed(name: str) -> None:
    pair = _Pair(lambda: optimizer(keras, name, **({} if name == "LossScaleOptimizer" else _OPTIONS)))
    pair.step()
    pair.assert_equal()
    public = _public(pair.inner) - _FIXED
    of_all = _public(keras.optimizers.Optimizer(0.5)) & public | {"learning_rate"}
    assert {"weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "ema_momentum"} <= of_all
    # What all optimizers have, they have from the same class: two of them suffice to change one of these at a time.
    in_turn = [[attribute] for attribute in sorted(of_all)] if name in {"SGD", "AdamW"} else [sorted(of_all)]
    for attributes in [*([attribute] for attribute in sorted(public - of_all)), *in_turn]:
        for attribute, each in itertools.product(attributes, (pair.bare, pair.inner)):
            value = 0.5 if attribute == "learning_rate" else getattr(each, attribute)
            if isinstance(value, str | bool | int | float | None):
                setattr(each, attribute, _changed(value))
        for _ in range(2):
            pair.step()
        pair.assert_equal()


@pytest.mark.usefixtures("_unlimited")
def test_attributes_inside_a_multi_optimizer_are_obeyed() -> None:
    pair = _Pair(lambda: optimizer(keras, "MultiOptimizer"))
    for momentum in (0.5, 0.25, 0.0):
        for each in (pair.bare, pair.inner):
            each.optimizers[0].momentum = momentum
        for _ in range(2):
            pair.step()
        pair.assert_equal()
    assert len(pair.programs) == 3


def _replace_schedule(opt: Any, _: list[Any]) -> None:
    opt.learning_rate = keras.optimizers.schedules.PolynomialDecay(0.25, 10)


def _change_schedule(opt: Any, _: list[Any]) -> None:
    opt._learning_rate.decay_rate = 0.125


def _change_constraint(_: Any, variables: list[Any]) -> None:
    variables[0].constraint.max_value = 0.5


def _replace_constraint(_: Any, variables: list[Any]) -> None:
    variables[0].constraint = keras.constraints.NonNeg()


def _exclude_by_name(opt: Any, _: list[Any]) -> None:
    opt.exclude_from_weight_decay(var_names=["bias"])


def _exclude_variable(opt: Any, variables: list[Any]) -> None:
    opt.exclude_from_weight_decay(var_list=variables[:1])


@pytest.mark.parametrize(
    "change",
    [
        _replace_schedule,
        _change_schedule,
        _change_constraint,
        _replace_constraint,
        _exclude_by_name,
        _exclude_variable,
    ],
)
def test_what_an_optimizer_refers_to_is_obeyed(change: Callable[[Any, list[Any]], None]) -> None:
    def make() -> Any:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
        return optimizer(keras, learning_rate=schedule, weight_decay=0.25)

    pair = _Pair(make, lambda: keras.constraints.MaxNorm(1.0))
    pair.steps_to_compile()
    change(pair.bare, pair.bare_variables)
    change(pair.inner, pair.variables)
    pair.steps_to_compile()
    pair.assert_equal()
    assert len(pair.programs) == 2


def test_a_program_is_made_once_for_settings_that_stay() -> None:
    pair = _Pair(lambda: optimizer(keras, "AdamW", global_clipnorm=0.5))
    for rate in (0.5, 0.25, 0.125, 0.0625):
        pair.bare.learning_rate = rate
        pair.wrapped.learning_rate = rate
        pair.step()
    pair.assert_equal()
    assert len(pair.programs) == 1


def test_settings_that_change_at_each_step_are_obeyed_without_compiling(caplog: pytest.LogCaptureFixture) -> None:
    pair = _Pair(lambda: optimizer(keras, momentum=0.5))
    for step in range(12):
        for each in (pair.bare, pair.inner):
            each.momentum = 0.5 + step / 100
        pair.step()
    pair.assert_equal()
    assert len(pair.programs) == 0
    (message,) = [record.message for record in caplog.records if "is not compiled" in record.message]
    assert "settings of the optimizer have changed 4 times in 5 steps" in message


def test_programs_keep_neither_the_optimizer_nor_its_variables_alive() -> None:
    pair = _Pair(lambda: optimizer(keras, "Adam", global_clipnorm=0.5))
    pair.steps_to_compile()
    assert len(pair.programs) == 1
    kept = [pair.inner, pair.wrapped, *pair.variables, *(each.value for each in pair.inner.variables)]
    references = [weakref.ref(each) for each in kept]
    del pair, kept
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_graphs_of_dropped_optimizers_are_freed() -> None:
    def graphs() -> int:
        gc.collect()
        return sum(type(each).__name__ == "FuncGraph" for each in gc.get_objects())

    def train() -> None:
        # Not the bare optimizer: in a function TensorFlow would keep its graph.
        pair = _Pair(lambda: optimizer(keras, "Adam"))
        pair.steps_to_compile()
        tf.function(pair.wrapped.apply)([tf.ones([3, 2])] * 2)

    train()
    before = graphs()
    for _ in range(3):
        train()
    assert graphs() == before


class _OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    rate = 0.5

    def __call__(self, step: Any) -> Any:
        del step
        return self.rate


def test_code_of_a_user_is_run_anew_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _Pair(lambda: optimizer(keras, learning_rate=_OwnSchedule()))
    for rate in (0.5, 0.25):
        monkeypatch.setattr(_OwnSchedule, "rate", rate)
        pair.step()
    pair.assert_equal()
    assert len(pair.programs) == 0


@pytest.mark.parametrize("jit_compile", ["auto", False])
def test_small_variables_are_compiled_on_demand_only(jit_compile: Any) -> None:
    inner, kernel = optimizer(keras), _kernel(None)
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1), jit_compile=jit_compile)
    opt.apply([tf.ones([3, 2])], [kernel])
    assert len(opt._compilers.of(inner).programs) == 0


def test_large_variables_are_compiled_by_default() -> None:
    inner, kernel = optimizer(keras), variable(keras, np.ones([1024, 1024]))
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(2))
    for _ in range(3):
        opt.apply([tf.ones([1024, 1024])], [kernel])
    assert len(opt._compilers.of(inner).programs) == 1
    assert kernel.numpy()[0, 0] == 0.25


def test_sparse_gradients_of_many_sizes_are_applied_in_eager_mode() -> None:
    pair = _Pair(lambda: optimizer(keras, "Adam"))
    for rows in ([0, 2, 2], [1], [0, 1], [2, 2, 2, 1, 0]):
        parts = tf.ones([len(rows), 2]), tf.constant(rows), tf.constant([3, 2])
        for opt, variables, scale in [(pair.bare, pair.bare_variables, 1), (pair.wrapped, pair.variables, SCALE)]:
            slices = [tf.IndexedSlices(parts[0] * scale, *parts[1:]) for _ in variables]
            opt.apply(slices, variables)
    pair.assert_equal()
    assert len(pair.programs) == 1


def test_a_tape_around_a_step_changes_nothing() -> None:
    pair = _Pair(lambda: optimizer(keras, "Adam"))
    with tf.GradientTape(persistent=True):
        pair.step()
        pair.step()
    pair.assert_equal()


def test_overflow_skips_the_step_in_eager_mode() -> None:
    pair = _Pair(lambda: optimizer(keras))
    before = [each.numpy() for each in pair.variables]
    pair.wrapped.apply([tf.constant([[1, float("inf")]] * 3), tf.ones([3, 2])], pair.variables)
    for own, other in zip(pair.variables, before, strict=True):
        np.testing.assert_array_equal(own.numpy(), other)
    assert int(pair.wrapped.iterations) == 0
