from typing import Any

import kerases
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.grad_scaler.step_parts import StepPart, adapter_of, earlier_together
from tfmp.hosts.keras.adapters import Keras3Adapter, KerasAdapter
from tfmp.hosts.keras.compiler import UpdateCompilers
from tfmp.hosts.keras.legacy import LegacyAdapter
from tfmp.hosts.tf1 import TF1Adapter


def _step(known: EarlierCheck | None, variables: int = 1) -> StepPart:
    weights = [tf.Variable(0.0, dtype=tf.float16) for _ in range(variables)]
    grads = [tf.constant(1.0)] * variables
    return StepPart(OptimizerAdapter(None, weights), grads, known)


def test_gradients_are_usable_together_only_if_those_of_each_optimizer_are() -> None:
    assert earlier_together([_step(None), _step(None)]) is None
    true, false = tf.constant(True), tf.constant(False)
    usable, incomplete = EarlierCheck(LocalResult(true)), EarlierCheck(LocalResult(true, complete=false))
    together = earlier_together([_step(None), _step(usable), _step(incomplete)])
    assert together is not None
    assert (bool(together.result.usable), bool(together.result.complete)) == (True, False)
    unusable = earlier_together([_step(usable), _step(EarlierCheck(LocalResult(false)))])
    assert unusable is not None
    assert (bool(unusable.result.usable), unusable.result.complete) == (False, None)


def test_overflow_counts_of_a_window_are_in_the_rows_of_its_variables() -> None:
    found = EarlierCheck(LocalResult(tf.constant(False)), overflow_counts=tf.constant([[1, 0, 0]], tf.int64))
    together = earlier_together([_step(None, variables=2), _step(found)])
    assert together is not None
    assert together.overflow_counts.numpy().tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_what_is_known_of_the_gradients_of_each_optimizer_is_joined() -> None:
    first, second = tf.constant(1.0), tf.constant(2.0)
    true, false = tf.constant(True), tf.constant(False)
    checks = [
        EarlierCheck(LocalResult(true, tf.constant(2.0)), checked=[first, None], of_micro_batches=True),
        EarlierCheck(LocalResult(true, tf.constant(3.0), true), checked=[second], of_micro_batches=True),
    ]
    together = earlier_together([_step(check) for check in checks])
    assert together is not None
    found = together.result
    assert (float(found.max_abs), bool(found.complete), together.of_micro_batches) == (3, True, True)
    assert [grad is own for grad, own in zip(together.checked, [first, None, second], strict=True)] == [True] * 3
    assert together.overflow_counts is None
    # Whoever is not complete, by its own flag or because there is no window: the step is not.
    for own, complete in [
        (LocalResult(false), False),
        (LocalResult(true, complete=false), False),
        (LocalResult(true), True),
    ]:
        together = earlier_together([_step(EarlierCheck(own)), _step(checks[1])])
        assert together is not None
        found = together.result
        assert (bool(found.complete), found.max_abs, together.of_micro_batches) == (complete, None, False)
    # The gradients of an optimizer without `unscale` were not checked.
    together = earlier_together([_step(checks[0]), _step(None)])
    assert together is not None
    assert (together.result.max_abs, together.of_micro_batches) == (None, False)


class _Own:
    def apply_gradients(self, grads_and_vars: Any, rate: float = 0.0) -> None:
        del grads_and_vars
        self.rate = rate


def test_arguments_reach_an_optimizer_of_the_user() -> None:
    own = _Own()
    adapter_of(own, [tf.Variable(0.0)], {"rate": 0.5}, UpdateCompilers("auto")).apply([tf.constant(1.0)])
    assert own.rate == 0.5


def test_optimizer_of_tf1_gets_no_pair_without_a_gradient() -> None:
    class Noting(tf.compat.v1.train.GradientDescentOptimizer):  # type: ignore[misc] # a class of any type
        def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            self.pairs = list(grads_and_vars)
            return super().apply_gradients(self.pairs, *args, **kwargs)

    noting, (without, trained) = Noting(1.0), (tf.Variable(0.0), tf.Variable(0.0))
    adapter_of(noting, [without, trained], {}, UpdateCompilers("auto")).apply([None, tf.constant(1.0)])
    [(grad, variable)] = noting.pairs
    assert (float(grad), variable is trained, float(trained)) == (1, True, -1)


@kerases.for_every_keras("keras2", "tf_keras")
def test_legacy_optimizer_can_step_for_the_first_time_in_a_later_trace(keras: Any) -> None:
    first, later = keras.optimizers.legacy.SGD(0.5), keras.optimizers.legacy.SGD(0.5, momentum=0.5)
    weights = [tf.Variable(1.0), tf.Variable(1.0)]
    scaler = tfmp.GradScaler(init_scale=8)

    @tf.function
    def step(with_later: bool) -> None:
        scaler.scale(tf.constant(0.0))
        scaler.step(first, [(tf.constant(8.0), weights[0])])
        if with_later:
            scaler.step(later, [(tf.constant(8.0), weights[1])])
        scaler.update()

    scaler.prepare(later, [weights[1]])
    assert len(later.variables()) == 2
    step(False)
    step(True)
    assert [float(weight) for weight in weights] == [0, 0.5]


@kerases.for_every_keras("keras3")
def test_optimizer_of_keras3_that_is_built_in_a_function_needs_no_other_trace(keras: Any) -> None:
    optimizers = [keras.optimizers.SGD(0.5, momentum=0.5, name=name) for name in ("first", "second")]
    weights = [tf.Variable(1.0, name="weight"), tf.Variable(1.0, name="weight")]
    scaler, traces = tfmp.GradScaler(init_scale=8), []

    @tf.function
    def step(with_second: bool) -> None:
        traces.append(with_second)
        scaler.scale(tf.constant(0.0))
        for index in range(1 + with_second):
            scaler.step(optimizers[index], [(tf.constant(8.0), weights[index])])
        scaler.update()

    step(False)
    assert [each.path for each in optimizers[0].variables[2:]] == ["first/weight_0_momentum"]
    # The second optimizer is built in a later trace, where TensorFlow lets a function make no variables.
    step(True)
    step(True)
    assert traces == [False, True]
    # With momentum the first weight changes by 0.5, 0.75 and 0.875, the second by 0.5 and 0.75.
    assert [float(weight) for weight in weights] == [-1.125, -0.25]


@pytest.mark.parametrize("keras", [pytest.param(keras, id=name) for name, keras in kerases.installed().items()])
def test_adapter_is_that_of_the_optimizers_host(keras: Any) -> None:
    class Changed(keras.optimizers.SGD):  # type: ignore[name-defined, misc] # one of two packages
        def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
            return super().apply_gradients(*args, **kwargs)

    weight, updates = tf.Variable(0.0), UpdateCompilers("auto")
    own = Keras3Adapter if keras.__version__.startswith("3.") else KerasAdapter
    for optimizer, kwargs, kind in [
        (tf.compat.v1.train.GradientDescentOptimizer(1.0), {"global_step": None}, TF1Adapter),
        (_Own(), {}, OptimizerAdapter),
        (keras.optimizers.SGD(1.0), {}, own),
        (keras.optimizers.SGD(1.0), {"name": None}, OptimizerAdapter),
        (Changed(1.0), {}, OptimizerAdapter),
        *([] if own is Keras3Adapter else [(keras.optimizers.legacy.SGD(1.0), {"name": None}, LegacyAdapter)]),
    ]:
        adapter = adapter_of(optimizer, [weight], kwargs, updates)
        assert type(adapter) is kind
        assert adapter.optimizer is optimizer
        assert adapter.variables[0] is weight
