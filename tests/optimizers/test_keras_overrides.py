"""Optimizers whose class a user wrote: every method that they override takes part in a wrapped step too."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, fit_linear, for_every_keras, installed, linear_model, optimizer, variable

import tfmp

#: The end of the name of a class that is given one more variable than it was built with, which only some runs do.
_UNKNOWN = ", one unknown"


def _decay(variables: Any) -> None:
    for each in variables:
        each.assign(each * 0.5)


def _limited(grads_and_vars: Any) -> list[Any]:
    return [(None if grad is None else tf.clip_by_value(grad, -1.0, 1.0), each) for grad, each in grads_and_vars]


def _classes(keras: ModuleType) -> dict[str, tuple[dict[str, Callable[..., Any]], dict[str, Any]]]:
    """Return by name what a user's class overrides, and the options of the optimizer."""
    sgd = keras.optimizers.SGD

    def applies(
        changed: Callable[[Any, Any], Any] = lambda grad, each: grad, decays: bool = False, forgets: bool = False
    ) -> Callable[..., Any]:
        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = [(changed(grad, each), each) for grad, each in grads_and_vars]
            _decay([each for _, each in pairs] if decays else [])
            return sgd.apply_gradients(self, pairs) if forgets else sgd.apply_gradients(self, pairs, *args, **kwargs)

        return apply_gradients

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        _decay(trainable_variables)
        sgd.apply(self, grads, trainable_variables)

    def update_step(self: Any, gradient: Any, each: Any, *rate: Any) -> None:
        _decay([each])
        sgd.update_step(self, gradient, each, *rate)

    def aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        return _limited(sgd.aggregate_gradients(self, grads_and_vars))

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        return _limited(sgd.compute_gradients(self, loss, var_list, tape))

    def double_sums(self: Any, grads_and_vars: Any) -> Any:
        return [(2.0 * grad, each) for grad, each in sgd.aggregate_gradients(self, grads_and_vars)]

    def strict(self: Any, grads_and_vars: Any, skip_gradients_aggregation: bool = False) -> Any:
        _decay([each for _, each in grads_and_vars])
        return sgd.apply_gradients(self, grads_and_vars, skip_gradients_aggregation=skip_gradients_aggregation)

    def build(self: Any, variables: Any) -> None:
        self.first, self.built = list(variables), True

    def apply_alone(self: Any, grads_and_vars: Any, **kwargs: Any) -> None:
        for grad, each in grads_and_vars:
            each.assign_sub(0.25 * grad)
        self.iterations.assign_add(1)

    def filtered(self: Any, grads_and_vars: Any, **kwargs: Any) -> Any:
        return sgd.apply_gradients(self, list(grads_and_vars)[:1], **kwargs)

    def filtered_apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        sgd.apply(self, grads[:1], trainable_variables[:1])

    found: dict[str, Any] = {
        # These take variables that Keras would refuse, since `build` did not get them.
        f"all itself{_UNKNOWN}": ({"build": build, "apply_gradients": apply_alone}, {}),
        f"filters in apply_gradients{_UNKNOWN}": ({"apply_gradients": filtered}, {}),
        "apply_gradients": ({"apply_gradients": applies(decays=True)}, {}),
        "update_step": ({"update_step": update_step}, {}),
        "apply_gradients, of other gradients": ({"apply_gradients": applies(lambda grad, each: 2.0 * grad)}, {}),
        # The norm is that of what the user adds to the gradients.
        "apply_gradients, clipped": (
            {"apply_gradients": applies(lambda grad, each: grad + 4 * each)},
            {"global_clipnorm": 0.5},
        ),
    }
    if keras.__version__.startswith("3."):
        return found | {"apply": ({"apply": apply}, {}), f"filters in apply{_UNKNOWN}": ({"apply": filtered_apply}, {})}
    return found | {
        "aggregate_gradients": ({"aggregate_gradients": aggregate_gradients}, {}),
        "aggregate_gradients, doubled": ({"aggregate_gradients": double_sums}, {}),
        "compute_gradients": ({"compute_gradients": compute_gradients}, {}),
        # It drops the argument that says what is summed.
        "apply_gradients, forgetful": ({"apply_gradients": applies(lambda grad, each: 2.0 * grad, forgets=True)}, {}),
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
    "apply": lambda step: step,
    "apply in a function": tf.function,
    "scaler": lambda step: step,
    "scaler that unscales": lambda step: step,
    "replicas": tf.function,
    "eager replicas": lambda step: step,
}


def _trained(
    keras: ModuleType,
    inner_of: Callable[[], Any],
    run: str,
    wraps: bool,
    strategy: tf.distribute.Strategy,
    has_unknown: bool = False,
) -> list[Any]:
    """Return the weights, 1 at the start, after each step, or at the end of `fit`.

    With a wrapper there is a step more, which must be skipped.
    """
    is_scaled, manager = "scaler" in run, tfmp.FixedLossScaleManager(SCALE)
    with strategy.scope():
        inner = opt = inner_of()
        if wraps and not is_scaled:
            opt = tfmp.LossScaleOptimizer(inner, manager, jit_compile=True if run == "compiled" else "auto")
        if run in _FITS:
            model = linear_model(keras, opt, **_FITS[run])
            model.set_weights([np.ones([1, 1])])
            fit_linear(model, [1.0, -4.0, *[math.nan] * wraps, 0.5])
            return [model.get_weights()[0].item()]
        weights = [variable(keras, [1.0]) for _ in range(1 + has_unknown)]
        opt.build(weights[:1])
    scaler = tfmp.GradScaler(manager=manager)

    def step(grad: tf.Tensor) -> None:
        # Each replica needs a tensor of its own: tf.distribute does not sum one that the replicas share.
        grads = [grad * 1.0 for _ in weights]
        if wraps:
            grads = [(scaler.scale if is_scaled else opt.scale_loss)(each) for each in grads]
        if "unscales" in run and wraps:
            grads = scaler.unscale(opt, grads)
        if "apply" in run:
            opt.apply(grads, weights)
        elif wraps and is_scaled:
            scaler.step(opt, list(zip(grads, weights, strict=True)))
            scaler.update()
        else:
            opt.apply_gradients(list(zip(grads, weights, strict=True)))

    def on_all(grad: tf.Tensor) -> None:
        strategy.run(step, args=(grad,)) if "replicas" in run else step(grad)

    take, found = _LOOPS[run](on_all), []
    for grad in (0.5, -4.0, *[math.nan] * wraps, 0.25):
        take(tf.constant([grad]))
        found.append([weight.numpy().item() for weight in weights])
    return [*found[:2], found[-1]]


def _rows() -> Iterator[Any]:
    for id_, keras in installed().items():
        for name, run in itertools.product(_classes(keras), [*_FITS, *_LOOPS]):
            # Optimizers of Keras 2 have no `apply`.
            may_run = run in {"eager", "function", "scaler"} if name.endswith(_UNKNOWN) else True
            if may_run and ("apply" not in run or id_ == "keras3"):
                yield pytest.param(keras, name, run, id=f"{id_}-{name}-{run}")


@pytest.mark.parametrize(("keras", "name", "run"), list(_rows()))
def test_overridden_methods_run_as_in_the_bare_optimizer_and_not_on_a_skipped_step(
    keras: ModuleType, name: str, run: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    strategy = two_replicas if "replicas" in run else tf.distribute.get_strategy()
    bare, ours = (
        _trained(keras, lambda: _make(keras, name), run, wraps, strategy, name.endswith(_UNKNOWN))
        for wraps in (False, True)
    )
    np.testing.assert_allclose(ours, bare, rtol=1e-6 if "clipped" in name else 0)
    # A loop of one's own does not call `compute_gradients`, and `apply` not `apply_gradients`.
    is_called = run in _FITS if name == "compute_gradients" else "apply" not in run or "apply_gradients" not in name
    if is_called and not name.endswith(_UNKNOWN):
        assert bare != _trained(keras, lambda: optimizer(keras, learning_rate=0.25), run, False, strategy)


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
