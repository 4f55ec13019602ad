"""The versions of Keras that are installed here, and what a test needs to treat them alike."""

import functools
import importlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers import LossScaleState
from tfmp.core.managers.step_counters import StepCounters

#: The scale that a manager starts from.
SCALE = 1024.0

_VERSIONS = {"keras3": ("keras", "3."), "keras2": ("keras", "2."), "tf_keras": ("tf_keras", "2.")}
_WITH_OPTIONS = {"SGD", "AdamW", "MultiOptimizer"}
_STATE = {*LossScaleState._fields, *StepCounters._fields}


def _find(name: str) -> ModuleType | str:
    """Return a Keras, or why it is not here."""
    package, version = _VERSIONS[name]
    if importlib.util.find_spec(package) is None:
        return f"needs {package} {version}*, which is not installed"
    found = importlib.metadata.version(package)
    return importlib.import_module(package) if found.startswith(version) else f"needs {package} {version}*, not {found}"


_KERASES = {name: _find(name) for name in _VERSIONS}


def installed() -> dict[str, ModuleType]:
    """Return each Keras that is installed, by its name."""
    return {name: keras for name, keras in _KERASES.items() if isinstance(keras, ModuleType)}


def for_every_keras(*names: str) -> pytest.MarkDecorator:
    """Run a test with each `keras` that is installed; skip it where none is.

    Args:
        names: Of "keras3", "keras2" (as `keras`) and "tf_keras"; all by default.
    """
    names = names or tuple(_VERSIONS)
    rows = [pytest.param(_KERASES[name], id=name) for name in names if isinstance(_KERASES[name], ModuleType)]
    return pytest.mark.parametrize("keras", rows or [_skipped(name, 1) for name in names])


def skip_before(release: tuple[int, int], keras: ModuleType, why: str) -> None:
    """Skip a test with a Keras 3 that is older than what the test needs.

    Args:
        release: The oldest Keras 3 that will do.
        keras: The Keras.
        why: What is different in older ones.
    """
    found = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if (3,) <= found < release:
        needed = ".".join(map(str, release))
        pytest.skip(f"needs Keras {needed} or newer, not {keras.__version__}: {why}")


def for_every_optimizer(*option_names: str) -> pytest.MarkDecorator:
    """Run a test with each `keras`, `name` of an optimizer and `options` for it; a Keras that is missing is skipped.

    Each optimizer comes without options; those of `_WITH_OPTIONS` with each, as it is the base class that has them.

    Args:
        option_names: Which options; all by default.
    """
    rows = []
    for id_, keras in _KERASES.items():
        if isinstance(keras, str):
            rows.append(_skipped(id_, 3))
            continue
        options = _options(keras)
        rows += [
            pytest.param(keras, name, options[option], id=f"{id_}-{name}-{option}")
            for name in optimizer_names(keras)
            for option in option_names or options
            if option in options and (option == "plain" or name in _WITH_OPTIONS)
        ]
    return pytest.mark.parametrize(("keras", "name", "options"), rows)


def optimizer_names(keras: ModuleType) -> list[str]:
    """Return the names of a Keras' optimizers, those of `optimizer`."""
    classes = {name: value for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    bases = {"LossScaleOptimizer", "Optimizer"}
    return sorted(name for name in classes.keys() - bases if issubclass(classes[name], keras.optimizers.Optimizer))


def optimizer(keras: ModuleType, name: str = "SGD", **options: Any) -> Any:
    """Make an optimizer that is not wrapped."""
    options = {"learning_rate": 0.5} | options
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"needs {name}, which Keras {keras.__version__} does not have")
    if name == "Muon":
        skip_before((3, 13), keras, "without a wrapper too, its Muon fails on TensorFlow's variables")
    if name == "MultiOptimizer":
        # One optimizer for the kernels and one for the biases.
        default, other = keras.optimizers.SGD(momentum=0.5, **options), keras.optimizers.Adam(**options)
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(default, {".*bias": other}))
    return getattr(keras.optimizers, name)(**options)


def wrap(inner: Any, **settings: Any) -> Any:
    """Wrap an optimizer, with a manager that halves and doubles."""
    defaults = {"init_loss_scale": SCALE, "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    return tfmp.LossScaleOptimizer(inner, tfmp.ExponentialUpdateLossScaleManager(**defaults | settings))


def variable(keras: ModuleType, value: Any, name: str = "kernel", dtype: str = "float32") -> Any:
    """Make a variable as the layers of a Keras make theirs."""
    return getattr(keras, "Variable", tf.Variable)(np.array(value, dtype), name=name, dtype=dtype)


def kernel_and_bias(keras: ModuleType) -> list[Any]:
    """Make two variables to train."""
    return [variable(keras, [[1, 2], [3, 4]]), variable(keras, [5, 6], "bias")]


def gradients(seed: int, last: float | None = None) -> list[tf.Tensor]:
    """Return gradients for `kernel_and_bias`, on which float32 computes exactly.

    Args:
        seed: What makes them differ.
        last: The value of their last element.
    """
    rng = np.random.default_rng(seed)
    kernel, bias = (np.float32(rng.integers(-8, 9, shape) / 4) for shape in ([2, 2], [2]))
    bias[-1] = bias[-1] if last is None else last
    return [tf.constant(kernel), tf.constant(bias)]


def take_step(opt: Any, variables: Sequence[Any], grads: Sequence[tf.Tensor]) -> None:
    """Take one step of a loop, in which these are the gradients; with a wrapper, of the loss that it scales."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable * grad) for variable, grad in zip(variables, grads, strict=True)])
        if isinstance(opt, tfmp.LossScaleOptimizer):
            loss = opt.scale_loss(loss)
    opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def assert_trains_as(plain: Any, opt: Any, keras: ModuleType, compiled: Callable[..., Any]) -> None:
    """See that an optimizer in a wrapper trains as one without, up to rounding, but for steps that overflow.

    Args:
        plain: The optimizer without a wrapper.
        opt: The one in a wrapper, made by `wrap` or alike.
        keras: Their Keras.
        compiled: Makes a `tf.function` of a step in the wrapper.
    """
    variables, plain_variables = kernel_and_bias(keras), kernel_and_bias(keras)
    opt.build(variables)
    plain.build(plain_variables)
    step = compiled(lambda grads: take_step(opt, variables, grads))
    # A function too: in tf_keras, Nadam counts at tracing.
    plain_step = tf.function(lambda grads: take_step(plain, plain_variables, grads))
    for seed, last in enumerate([None, math.inf, None, -math.inf, math.nan, None]):
        before = [*values(variables), *values_but_state(opt)]
        step(gradients(seed, last))
        if last is not None:
            assert [*values(variables), *values_but_state(opt)] == before
            continue
        plain_step(gradients(seed))
        for one, other in zip(
            [*variables, *opt.inner_optimizer.variables], [*plain_variables, *plain.variables], strict=True
        ):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (SCALE / 8, 3, 3)


def dense_model(keras: ModuleType, opt: Any, policy: str = "float32", **settings: Any) -> Any:
    """Make a model of two layers, with the same weights at every call, and compile it.

    Args:
        keras: The Keras.
        opt: The optimizer.
        policy: The layers' policy.
        settings: More for `compile`.
    """
    # Keras 2.15's random initializers warn.
    layer = functools.partial(keras.layers.Dense, kernel_initializer="ones", dtype=policy)
    model = keras.Sequential([keras.Input([3]), layer(4, activation="relu"), layer(1)])
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=weight.shape) for weight in model.weights])
    model.compile(opt, **{"loss": "mse"} | settings)
    return model


def linear_model(keras: ModuleType, opt: Any, **settings: Any) -> Any:
    """Make a model of one weight, which starts from 0 and whose gradient is the target; fit it with `fit_linear`.

    Args:
        keras: The Keras.
        opt: The optimizer.
        settings: More for `compile`.
    """
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input([1]), layer])
    model.compile(opt, loss=lambda target, output: target * output, **settings)
    return model


def fit_linear(model: Any, targets: Sequence[float], **settings: Any) -> None:
    """Fit a `linear_model`, to one target in each step."""
    y = np.float32(targets).reshape(-1, 1)
    model.fit(np.ones_like(y), y, **{"batch_size": 1, "shuffle": False, "verbose": 0} | settings)


def values(variables: Sequence[Any]) -> list[Any]:
    """Return the variables' values."""
    return [variable.numpy().tolist() for variable in variables]


def values_but_state(opt: Any) -> list[Any]:
    """Return the values of all variables of an optimizer but those of the loss scale's own state."""
    return values([variable for variable in opt.variables if _name(variable) not in _STATE])


def state(opt: Any, *names: str) -> list[Any]:
    """Return the values of the variables that hold the loss scale's own state.

    Args:
        opt: The optimizer.
        names: Which ones.
    """
    held = {_name(variable): variable.numpy() for variable in opt.variables}
    return [held[name] for name in names]


def _options(keras: ModuleType) -> dict[str, dict[str, Any]]:
    options = {
        "plain": {},
        "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        "weight_decay": {"weight_decay": 0.25},
        "clipnorm": {"clipnorm": 0.5},
        "clipvalue": {"clipvalue": 0.5},
        "global_clipnorm": {"global_clipnorm": 0.5},
        "schedule": {"learning_rate": keras.optimizers.schedules.PolynomialDecay(0.5, 10)},
    }
    if keras.__version__.startswith("3."):
        options["accumulation"] = {"gradient_accumulation_steps": 2}
    return options


def _name(variable: Any) -> str:
    # Keras 2's names end in `:0`.
    return str(variable.name).split(":")[0]


def _skipped(name: str, width: int) -> Any:
    """Return the parameters of a Keras that is not installed."""
    return pytest.param(*[None] * width, id=name, marks=pytest.mark.skip(reason=str(_KERASES[name])))
