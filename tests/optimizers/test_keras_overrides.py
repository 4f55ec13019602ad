"""Optimizers whose class a user wrote: every method that they override takes part in a wrapped step too."""

import functools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, fit_linear, for_every_keras, installed, linear_model, optimizer, variable

import tfmp


def _decay(variables: Any) -> None:
    for each in variables:
        each.assign(each * 0.5)


def _limited(grads_and_vars: Any) -> list[Any]:
    return [(None if grad is None else tf.clip_by_value(grad, -1.0, 1.0), each) for grad, each in grads_and_vars]


def _classes(keras: ModuleType) -> dict[str, tuple[dict[str, Callable[..., Any]], dict[str, Any]]]:
    """Return by name what a user's class overrides, and the options of the optimizer."""
    sgd = keras.optimizers.SGD

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        _decay([each for _, each in grads_and_vars])
        return sgd.apply_gradients(self, grads_and_vars, *args, **kwargs)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        _decay(trainable_variables)
        sgd.apply(self, grads, trainable_variables)

    def update_step(self: Any, gradient: Any, each: Any, *rate: Any) -> None:
        each.assign(each * 0.5)
        sgd.update_step(self, gradient, each, *rate)

    def aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        return _limited(sgd.aggregate_gradients(self, grads_and_vars))

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        return _limited(sgd.compute_gradients(self, loss, var_list, tape))

    def double(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return sgd.apply_gradients(self, [(2.0 * grad, each) for grad, each in grads_and_vars], *args, **kwargs)

    def double_sums(self: Any, grads_and_vars: Any) -> Any:
        return [(2.0 * grad, each) for grad, each in sgd.aggregate_gradients(self, grads_and_vars)]

    def forget(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return sgd.apply_gradients(self, [(2.0 * grad, each) for grad, each in grads_and_vars])

    def strict(self: Any, grads_and_vars: Any, skip_gradients_aggregation: bool = False) -> Any:
        _decay([each for _, each in grads_and_vars])
        return sgd.apply_gradients(self, grads_and_vars, skip_gradients_aggregation=skip_gradients_aggregation)

    def decay_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return sgd.apply_gradients(self, [(grad + 4 * each, each) for grad, each in grads_and_vars], *args, **kwargs)

    found: dict[str, Any] = {
        "apply_gradients": ({"apply_gradients": apply_gradients}, {}),
        "update_step": ({"update_step": update_step}, {}),
        "apply_gradients, of other gradients": ({"apply_gradients": double}, {}),
        # The norm is that of what the user adds to the gradients.
        "apply_gradients, clipped": ({"apply_gradients": decay_gradients}, {"global_clipnorm": 0.5}),
    }
    if keras.__version__.startswith("3."):
        return found | {"apply": ({"apply": apply}, {})}
    return found | {
        "aggregate_gradients": ({"aggregate_gradients": aggregate_gradients}, {}),
        "aggregate_gradients, doubled": ({"aggregate_gradients": double_sums}, {}),
        "compute_gradients": ({"compute_gradients": compute_gradients}, {}),
        # It drops the argument that says what is summed.
        "apply_gradients, forgetful": ({"apply_gradients": forget}, {}),
        # It takes no argument that `fit` does not pass.
        "apply_gradients, strict": ({"apply_gradients": strict}, {}),
    }


def _make(keras: ModuleType, name: str) -> Any:
    overridden, options = _classes(keras)[name]
    return type("Overriding", (keras.optimizers.SGD,), overridden)(0.25, **options)


#: How an optimizer is run; and for fits, the settings of `compile`.
_FITS: dict[str, dict[str, Any]] = {"fit": {}, "eager fit": {"run_eagerly": True}, "XLA's fit": {"jit_compile": True}}
_LOOPS: dict[str, Callable[..., Any]] = {
    "eager": lambda step: step,
    "function": tf.function,
    "xla": functools.partial(tf.function, jit_compile=True),
    "compiled": tf.function,
    "scaler": lambda step: step,
    "scaler that unscales": lambda step: step,
    "replicas": tf.function,
    "eager replicas": lambda step: step,
}


def _trained(
    keras: ModuleType, inner_of: Callable[[], Any], run: str, wraps: bool, strategy: tf.distribute.Strategy
) -> list[float]:
    """Return the weight, 1 at the start, after each step, or at the end of `fit`."""
    is_scaled, manager = "scaler" in run, tfmp.FixedLossScaleManager(SCALE)
    with strategy.scope():
        inner = opt = inner_of()
        if wraps and not is_scaled:
            opt = tfmp.LossScaleOptimizer(inner, manager, jit_compile=True if run == "compiled" else "auto")
        if run in _FITS:
            model = linear_model(keras, opt, **_FITS[run])
            model.set_weights([np.ones([1, 1])])
            fit_linear(model, [1.0, -4.0, 0.5])
            return [model.get_weights()[0].item()]
        weight = variable(keras, [1.0])
        opt.build([weight])
    scaler = tfmp.GradScaler(manager=manager)

    def step(grad: tf.Tensor) -> None:
        if not wraps:
            # Each replica needs a tensor of its own: tf.distribute does not sum one that the replicas share.
            opt.apply_gradients([(grad * 1.0, weight)])
        elif not is_scaled:
            opt.apply_gradients([(opt.scale_loss(grad), weight)])
        else:
            grads = [scaler.scale(grad)]
            scaler.step(opt, [((scaler.unscale(opt, grads) if "unscales" in run else grads)[0], weight)])
            scaler.update()

    def on_all(grad: tf.Tensor) -> None:
        strategy.run(step, args=(grad,)) if "replicas" in run else step(grad)

    take, found = _LOOPS[run](on_all), []
    for grad in (0.5, -4.0, 0.25):
        take(tf.constant([grad]))
        found.append(weight.numpy().item())
    return found


def _rows() -> Iterator[Any]:
    for id_, keras in installed().items():
        for name in _classes(keras):
            for run in [*_FITS, *_LOOPS]:
                yield pytest.param(keras, name, run, id=f"{id_}-{name}-{run}")


@pytest.mark.parametrize(("keras", "name", "run"), list(_rows()))
def test_overridden_methods_are_called_as_the_bare_optimizer_calls_them(
    keras: ModuleType, name: str, run: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    strategy = two_replicas if "replicas" in run else tf.distribute.get_strategy()
    bare, ours = (_trained(keras, lambda: _make(keras, name), run, wraps, strategy) for wraps in (False, True))
    np.testing.assert_allclose(ours, bare, rtol=1e-6 if "clipped" in name else 0)
    # A loop of one's own does not call `compute_gradients`.
    if name != "compute_gradients" or run in _FITS:
        assert bare != _trained(keras, lambda: optimizer(keras, learning_rate=0.25), run, False, strategy)


@pytest.mark.parametrize(
    ("keras", "name"),
    [pytest.param(each, name, id=f"{id_}-{name}") for id_, each in installed().items() for name in _classes(each)],
)
def test_overridden_methods_are_not_called_on_a_skipped_step(keras: ModuleType, name: str) -> None:
    opt = tfmp.LossScaleOptimizer(_make(keras, name), tfmp.FixedLossScaleManager(SCALE))
    model = linear_model(keras, opt)
    model.set_weights([np.ones([1, 1])])
    fit_linear(model, [math.nan])
    assert (model.get_weights()[0].item(), int(opt.skipped_steps)) == (1, 1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@for_every_keras("keras3")
def test_apply_calls_what_the_bare_optimizer_calls(keras: ModuleType, compiled: bool) -> None:
    def trained(name: str, wraps: bool) -> float:
        inner, weight = _make(keras, name), variable(keras, [1.0])
        opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE)) if wraps else inner
        opt.build([weight])
        grad = tf.constant([0.5 * SCALE if wraps else 0.5])

        def step() -> None:
            opt.apply([grad], [weight])

        (tf.function(step) if compiled else step)()
        return weight.numpy().item()

    for name in _classes(keras):
        assert trained(name, True) == pytest.approx(trained(name, False), rel=1e-6), name


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


@pytest.mark.parametrize("way", ["does all itself", "filters in apply_gradients", "filters in apply"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@for_every_keras()
def test_own_class_may_take_variables_that_keras_would_refuse(keras: ModuleType, compiled: bool, way: str) -> None:
    if way == "filters in apply" and keras.__version__.startswith("2."):
        pytest.skip("Keras 2 has no apply")

    def trained(front: str) -> list[float]:
        inner, manager = _takes_what_keras_refuses(keras, way), tfmp.FixedLossScaleManager(SCALE)
        known, other = variable(keras, [1.0]), variable(keras, [1.0])
        inner.build([known])
        opt = tfmp.LossScaleOptimizer(inner, manager) if front == "wrapper" else inner
        scaler, grads = tfmp.GradScaler(manager=manager), [tf.constant([2.0]), tf.constant([4.0])]

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
