"""Optimizers whose class a user wrote: every method that they override takes part in a wrapped step too."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, fit_linear, for_every_keras, linear_model, optimizer, variable

import tfmp


def _decays(variables: Any) -> None:
    for each in variables:
        each.assign(each * 0.5)


def _limited(grads_and_vars: Any) -> list[Any]:
    return [(None if grad is None else tf.clip_by_value(grad, -1.0, 1.0), each) for grad, each in grads_and_vars]


def _overriding(keras: ModuleType, method: str, **options: Any) -> Any:
    """Return an optimizer of a user's class that overrides a method."""
    sgd = keras.optimizers.SGD

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        _decays([each for _, each in grads_and_vars])
        return sgd.apply_gradients(self, grads_and_vars, *args, **kwargs)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        _decays(trainable_variables)
        sgd.apply(self, grads, trainable_variables)

    def update_step(self: Any, gradient: Any, each: Any, *rate: Any) -> None:
        each.assign(each * 0.5)
        sgd.update_step(self, gradient, each, *rate)

    def aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        return _limited(sgd.aggregate_gradients(self, grads_and_vars))

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        return _limited(sgd.compute_gradients(self, loss, var_list, tape))

    overrides = [apply_gradients, apply, update_step, aggregate_gradients, compute_gradients]
    (override,) = [each for each in overrides if each.__name__ == method]
    return type("Overriding", (sgd,), {method: override})(**{"learning_rate": 0.25} | options)


def _methods(*kerases: str) -> Callable[[Any], Any]:
    """Run a test with each method that an optimizer of these versions of Keras can override."""
    methods = {"keras3": ["apply_gradients", "apply", "update_step"]}
    keras2 = ["apply_gradients", "update_step", "aggregate_gradients", "compute_gradients"]
    rows = []
    for name in kerases:
        for row in for_every_keras(name).args[1]:
            rows += [
                pytest.param(*row.values, method, id=f"{name}-{method}", marks=row.marks)
                for method in methods.get(name, keras2)
            ]
    return pytest.mark.parametrize(("keras", "method"), rows)


_every_method = _methods("keras3", "keras2", "tf_keras")


@pytest.mark.parametrize(
    "settings", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=["function", "eager", "xla"]
)
@_every_method
def test_fit_calls_overridden_methods(keras: ModuleType, method: str, settings: dict[str, Any]) -> None:
    weights = []
    for wraps in (False, True):
        inner = _overriding(keras, method)
        model = linear_model(
            keras, tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE)) if wraps else inner, **settings
        )
        model.set_weights([np.ones([1, 1])])
        fit_linear(model, [1.0, -4.0, 0.5])
        weights.append(model.get_weights()[0].item())
    assert weights[1] == weights[0]
    plain = linear_model(keras, optimizer(keras, learning_rate=0.25))
    plain.set_weights([np.ones([1, 1])])
    fit_linear(plain, [1.0, -4.0, 0.5])
    assert weights[0] != plain.get_weights()[0].item()


@_every_method
def test_overridden_methods_are_not_called_on_a_skipped_step(keras: ModuleType, method: str) -> None:
    opt = tfmp.LossScaleOptimizer(_overriding(keras, method), tfmp.FixedLossScaleManager(SCALE))
    model = linear_model(keras, opt)
    model.set_weights([np.ones([1, 1])])
    fit_linear(model, [math.nan])
    assert (model.get_weights()[0].item(), int(opt.skipped_steps)) == (1, 1)


@pytest.mark.parametrize("way", ["apply", "apply_gradients"])
@_methods("keras3")
def test_loop_calls_what_the_bare_optimizer_calls(keras: ModuleType, method: str, way: str) -> None:
    def trained(wraps: bool) -> float:
        inner = _overriding(keras, method)
        opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE)) if wraps else inner
        weight = variable(keras, [1.0])
        opt.build([weight])
        grad = tf.constant([0.5 * SCALE if wraps else 0.5])

        def step() -> None:
            if way == "apply":
                opt.apply([grad], [weight])
            else:
                opt.apply_gradients([(grad, weight)])

        step()
        tf.function(step)()
        return weight.numpy().item()

    assert trained(True) == trained(False)


@pytest.mark.parametrize("unscales", [False, True])
@_every_method
def test_scaler_calls_overridden_methods(keras: ModuleType, method: str, unscales: bool) -> None:
    bare, opt = _overriding(keras, method), _overriding(keras, method)
    bare_weight, weight = variable(keras, [1.0]), variable(keras, [1.0])
    scaler = tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(SCALE))
    for grad in (tf.constant([0.5]), tf.constant([-4.0])):
        bare.apply_gradients([(grad, bare_weight)])
        scaler.scale(tf.constant(1.0))
        grads = [grad * SCALE]
        if unscales:
            grads = scaler.unscale(opt, grads)
        scaler.step(opt, [(grads[0], weight)])
        scaler.update()
    assert weight.numpy().item() == bare_weight.numpy().item()


def _takes_what_keras_refuses(keras: ModuleType, way: str) -> Any:
    """Return an optimizer of a user's class that is called with variables that it was not built with."""
    sgd = keras.optimizers.SGD

    def build(self: Any, variables: Any) -> None:
        self.first = list(variables)
        self.built = True

    def apply_alone(self: Any, grads_and_vars: Any, **kwargs: Any) -> None:
        del kwargs
        for grad, each in grads_and_vars:
            each.assign_sub(0.25 * grad)
        self.iterations.assign_add(1)

    def apply_gradients(self: Any, grads_and_vars: Any, **kwargs: Any) -> Any:
        return sgd.apply_gradients(self, list(grads_and_vars)[:1], **kwargs)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        sgd.apply(self, grads[:1], trainable_variables[:1])

    overrides: dict[str, dict[str, Any]] = {
        "does all itself": {"build": build, "apply_gradients": apply_alone},
        "filters in apply_gradients": {"apply_gradients": apply_gradients},
        "filters in apply": {"apply": apply},
    }
    return type("Own", (sgd,), overrides[way])(0.25)


@pytest.mark.parametrize("way", ["does all itself", "filters in apply_gradients"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@for_every_keras()
def test_own_class_may_take_variables_that_keras_would_refuse(keras: ModuleType, compiled: bool, way: str) -> None:
    _assert_trains_as_bare(keras, compiled, way)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@for_every_keras("keras3")
def test_own_apply_may_take_variables_that_keras_would_refuse(keras: ModuleType, compiled: bool) -> None:
    _assert_trains_as_bare(keras, compiled, "filters in apply")


def _assert_trains_as_bare(keras: ModuleType, compiled: bool, way: str) -> None:
    def trained(front: str) -> list[float]:
        inner = _takes_what_keras_refuses(keras, way)
        known, other = variable(keras, [1.0]), variable(keras, [1.0])
        inner.build([known])
        manager = tfmp.FixedLossScaleManager(SCALE)
        opt = tfmp.LossScaleOptimizer(inner, manager) if front == "wrapper" else inner
        scaler = tfmp.GradScaler(manager=manager)
        grads = [tf.constant([2.0]), tf.constant([4.0])]

        def step() -> None:
            if front == "scaler":
                scaler.scale(tf.constant(1.0))
                scaler.step(inner, list(zip([grad * SCALE for grad in grads], [known, other], strict=True)))
                scaler.update()
            else:
                ready = opt.get_unscaled_gradients([grad * SCALE for grad in grads]) if front == "wrapper" else grads
                opt.apply_gradients(list(zip(ready, [known, other], strict=True)))

        (tf.function(step) if compiled else step)()
        return [known.numpy().item(), other.numpy().item()]

    assert trained("wrapper") == trained("scaler") == trained("bare") != [1, 1]


@for_every_keras("keras2", "tf_keras")
def test_own_aggregation_sees_gradients_in_true_magnitude_in_every_loop(keras: ModuleType) -> None:
    for compiled in (lambda function: function, tf.function):
        opt = tfmp.LossScaleOptimizer(
            _overriding(keras, "aggregate_gradients"), tfmp.FixedLossScaleManager(SCALE), jit_compile=True
        )
        weight = variable(keras, [1.0])
        opt.build([weight])

        def step(opt: Any = opt, weight: Any = weight) -> None:
            opt.scale_loss(tf.constant(1.0))
            opt.apply_gradients([(tf.constant([2.0 * SCALE]), weight)])

        compiled(step)()
        assert weight.numpy().item() == 0.75


@for_every_keras("keras2", "tf_keras")
def test_override_may_leave_out_arguments_that_fit_does_not_pass(keras: ModuleType) -> None:
    class Strict(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, skip_gradients_aggregation: bool = False) -> Any:
            return super().apply_gradients(grads_and_vars, skip_gradients_aggregation=skip_gradients_aggregation)

    model = linear_model(keras, tfmp.LossScaleOptimizer(Strict(0.5), tfmp.FixedLossScaleManager(SCALE)))
    fit_linear(model, [1.0])
    assert model.get_weights()[0].item() == -0.5


@pytest.mark.parametrize("jit_compile", [True, False])
@for_every_keras()
def test_clipping_by_norm_follows_what_a_user_adds_to_the_gradients(keras: ModuleType, jit_compile: bool) -> None:
    class Decaying(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            decayed = [(grad + 4 * each, each) for grad, each in grads_and_vars]
            return super().apply_gradients(decayed, *args, **kwargs)

    def trained(wraps: bool) -> np.ndarray:
        inner = Decaying(0.5, global_clipnorm=0.5)
        opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1), jit_compile=jit_compile) if wraps else inner
        weight = variable(keras, [1.0, -2.0])
        opt.build([weight])
        grad = tf.constant([3.0, 4.0])
        tf.function(lambda: opt.apply_gradients([(grad, weight)]), jit_compile=not jit_compile)()
        return weight.numpy()

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "kerases"), [("minimize", ("2", "3")), ("scale_loss", "3"), ("compute_gradients", "3")]
)
@for_every_keras()
def test_methods_that_are_never_called_are_named(
    keras: ModuleType, method: str, kerases: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = type("Overriding", (keras.optimizers.SGD,), {method: lambda self, *args, **kwargs: None})(0.5)
    tfmp.LossScaleOptimizer(own, tfmp.FixedLossScaleManager(SCALE))
    tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(SCALE))
    messages = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    expected = [f"Overriding.{method} is never called"] if keras.__version__.startswith(kerases) else []
    assert [message.partition(",")[0] for message in messages] == expected


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@_every_method
def test_replicas_call_overridden_methods(
    keras: ModuleType, method: str, compiled: bool, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    def trained(wraps: bool) -> list[float]:
        with two_replicas.scope():
            inner = _overriding(keras, method)
            opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE)) if wraps else inner
            weight = variable(keras, [1.0])
            opt.build([weight])

        def step(factor: tf.Tensor) -> None:
            # Each replica needs a tensor of its own: tf.distribute does not sum one that the replicas share.
            grad = factor * opt.scale_loss(1.0) if wraps else factor * 1.0
            opt.apply_gradients([(grad, weight)])

        def run(factor: tf.Tensor) -> None:
            two_replicas.run(step, args=(factor,))

        weights = []
        for factor in (tf.constant([0.5]), tf.constant([-4.0])):
            (tf.function(run) if compiled else run)(factor)
            weights.append(weight.numpy().item())
        return weights

    # Two gradients of 0.5, then of -4. A loop of one's own does not call `compute_gradients`.
    expected = {"aggregate_gradients": [0.75, 1.0], "compute_gradients": [0.75, 2.75]}.get(method, [0.25, 2.125])
    assert trained(True) == trained(False) == expected


@for_every_keras("keras3")
def test_replicas_apply_the_gradients_that_an_override_changes(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    class Doubling(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            return super().apply_gradients([(2.0 * grad, each) for grad, each in grads_and_vars])

    def trained(wraps: bool) -> float:
        with two_replicas.scope():
            opt = (
                tfmp.LossScaleOptimizer(Doubling(0.25), tfmp.FixedLossScaleManager(SCALE)) if wraps else Doubling(0.25)
            )
            weight = variable(keras, [1.0])
            opt.build([weight])

        def step(grad: tf.Tensor) -> None:
            opt.apply_gradients([(grad, weight)])

        tf.function(lambda grad: two_replicas.run(step, args=(grad,)))(tf.constant([0.5 * SCALE if wraps else 0.5]))
        return weight.numpy().item()

    assert trained(True) == trained(False) == 0.5


@for_every_keras("keras2", "tf_keras")
def test_override_that_drops_arguments_adds_replicas_up_once(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    class Forgetful(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            return super().apply_gradients(grads_and_vars)

    with two_replicas.scope():
        opt = tfmp.LossScaleOptimizer(Forgetful(0.25), tfmp.FixedLossScaleManager(SCALE))
        weight = variable(keras, [1.0])
        opt.build([weight])

    def step() -> None:
        opt.apply_gradients([(opt.scale_loss(tf.constant([0.5])), weight)])

    tf.function(lambda: two_replicas.run(step))()
    assert weight.numpy().item() == 0.75
