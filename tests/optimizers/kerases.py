"""The versions of Keras that are installed, and functions with which a test can treat all of them alike."""

import functools
import importlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kit.keras_hosts import of_tensorflow

import tfmp
from tfmp.core.managers import LossScaleState
from tfmp.core.managers.step_counters import StepCounters

#: The scale that a manager starts from.
SCALE = 1024.0

_VERSIONS = {"keras3": ("keras", "3."), "keras2": ("keras", "2."), "tf_keras": ("tf_keras", "2.")}
_WITH_OPTIONS = {"SGD", "AdamW", "MultiOptimizer"}
_STATE = {*LossScaleState._fields, *StepCounters._fields}


def _find(name: str) -> ModuleType | str:
    """Return a Keras module; or, if it is not installed, the reason for skipping its tests."""
    package, version = _VERSIONS[name]
    if importlib.util.find_spec(package) is None:
        return f"needs {package} {version}*, which is not installed"
    found = importlib.metadata.version(package)
    return importlib.import_module(package) if found.startswith(version) else f"needs {package} {version}*, not {found}"


_KERASES = {name: _find(name) for name in _VERSIONS}


def installed() -> dict[str, ModuleType]:
    """Return the modules of the installed versions of Keras, by their keys in `_VERSIONS`."""
    return {name: keras for name, keras in _KERASES.items() if isinstance(keras, ModuleType)}


def for_every_keras(*names: str) -> pytest.MarkDecorator:
    """Run a test with each `keras` that is installed: "keras3", "keras2" (the package `keras`), "tf_keras", or all."""
    names = names or tuple(_VERSIONS)
    rows = [pytest.param(_KERASES[name], id=name) for name in names if isinstance(_KERASES[name], ModuleType)]
    skipped = [pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(_KERASES[name]))) for name in names]
    return pytest.mark.parametrize("keras", rows or skipped)


def kinds() -> dict[str, tuple[ModuleType, ModuleType]]:
    """Return the kinds of optimizers that are installed, legacy ones too: the Keras, and the module of these."""
    found = {}
    for name, keras in installed().items():
        found[name] = (keras, keras.optimizers)
        if name != "keras3":
            found[f"{name}, legacy"] = (keras, keras.optimizers.legacy)
    return found


#: Runs a test with each of these kinds: the parameters `keras` and `optimizers`.
for_every_kind = pytest.mark.parametrize(
    ("keras", "optimizers"), [pytest.param(*kind, id=name) for name, kind in kinds().items()]
)


def skip_before(release: tuple[int, int], keras: ModuleType, why: str) -> None:
    """Skip a test with a Keras 3 that is older than what the test needs."""
    found = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if (3,) <= found < release:
        needed = ".".join(map(str, release))
        pytest.skip(f"needs Keras {needed} or newer, not {keras.__version__}: {why}")


def every_optimizer() -> Iterator[tuple[str, ModuleType, str, str, dict[str, Any]]]:
    """Yield the optimizers of each kind: its key, its Keras, the optimizer's name, and options with their name.

    Every optimizer is there without options, "plain". Only those of `_WITH_OPTIONS` are there with options, because the
    base class of all optimizers implements the options.
    """
    for id_, (keras, optimizers) in kinds().items():
        for name in optimizer_names(optimizers):
            for option, options in _options(id_, keras).items():
                if option == "plain" or name in _WITH_OPTIONS:
                    yield id_, keras, name, option, options


def optimizer_names(optimizers: ModuleType) -> list[str]:
    """Return the names of the optimizers in a module of Keras, which `optimizer` accepts."""
    classes = {name: value for name, value in vars(optimizers).items() if isinstance(value, type)}
    bases = {"LossScaleOptimizer", "Optimizer"}
    return sorted(name for name in classes.keys() - bases if issubclass(classes[name], optimizers.Optimizer))


def optimizer(keras: ModuleType, name: str = "SGD", *, legacy: bool = False, **options: Any) -> Any:
    """Make an optimizer that is not wrapped."""
    optimizers, options = keras.optimizers.legacy if legacy else keras.optimizers, {"learning_rate": 0.5} | options
    if not hasattr(optimizers, name):
        pytest.skip(f"needs {name}, which Keras {keras.__version__} does not have")
    if name == "Muon":
        skip_before((3, 13), keras, "without a wrapper too, its Muon fails on TensorFlow's variables")
    if name == "MultiOptimizer":
        # One optimizer for the kernels and one for the biases.
        default, other = optimizers.SGD(momentum=0.5, **options), optimizers.Adam(**options)
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(default, {".*bias": other}))
    return getattr(optimizers, name)(**options)


def wrap(inner: Any, **settings: Any) -> Any:
    """Wrap an optimizer, with a manager that halves the scale at each overflow unless `settings` say otherwise."""
    rule = {"init_loss_scale": SCALE, "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    rule |= {name: settings.pop(name) for name in rule.keys() & settings.keys()}
    return tfmp.LossScaleOptimizer(inner, tfmp.ExponentialUpdateLossScaleManager(**rule), **settings)


def variable(keras: ModuleType, value: Any, name: str = "kernel", dtype: str = "float32") -> Any:
    """Make a variable of the type that the layers of a Keras use."""
    return getattr(keras, "Variable", tf.Variable)(np.array(value, dtype), name=name, dtype=dtype)


def kernel_and_bias(keras: ModuleType) -> list[Any]:
    """Make two variables to train."""
    return [variable(keras, [[1, 2], [3, 4]]), variable(keras, [5, 6], "bias")]


def gradients(seed: int, last: float | None = None) -> list[tf.Tensor]:
    """Return random gradients for `kernel_and_bias`, with which float32 computes exactly; `last` is the bias's last."""
    rng = np.random.default_rng(seed)
    kernel, bias = (np.float32(rng.integers(-8, 9, shape) / 4) for shape in ([2, 2], [2]))
    bias[-1] = bias[-1] if last is None else last
    return [tf.constant(kernel), tf.constant(bias)]


def take_step(opt: Any, variables: Sequence[Any], grads: Sequence[tf.Tensor]) -> None:
    """Take one step on a loss with the given gradients. If the optimizer is a wrapper, it scales the loss."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable * grad) for variable, grad in zip(variables, grads, strict=True)])
        if isinstance(opt, tfmp.LossScaleOptimizer):
            loss = opt.scale_loss(loss)
    opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def assert_trains_as(
    plain: Any,
    opt: Any,
    keras: ModuleType,
    run: Callable[..., Any] | None = None,
    *,
    make: Callable[[ModuleType], list[Any]] = kernel_and_bias,
    grads_of: Callable[..., Sequence[Any]] = gradients,
) -> None:
    """Assert that a wrapped optimizer skips steps that overflow, and otherwise trains as it does without a wrapper.

    In eager code both are alike in every bit. `run` makes what runs a step of either, of a function that takes one.
    """
    variables, plain_variables = make(keras), make(keras)
    is_legacy = not hasattr(plain, "build")
    if not is_legacy:
        opt.build(variables)
        plain.build(plain_variables)

    steps = [functools.partial(take_step, *each) for each in ((opt, variables), (plain, plain_variables))]
    step, plain_step = steps if run is None else map(run, steps)
    tolerance = {"rtol": 0, "atol": 0} if run is None else {"rtol": 1e-5, "atol": 1e-6}
    for seed, last in enumerate([None, math.inf, None, -math.inf, math.nan, None]):
        before = [*values(variables), *values_but_state(opt)]
        step(grads_of(seed, last))
        if last is not None:
            assert [*values(variables), *values_but_state(opt)] == before
        else:
            plain_step(grads_of(seed))
        assert (opt.iterations.numpy(), bool(opt.last_step_finite)) == (plain.iterations.numpy(), last is None)
        of_both = [*variables, *variables_of(opt.inner_optimizer)], [*plain_variables, *variables_of(plain)]
        for one, other in zip(*of_both, strict=True):
            assert not is_legacy or one.name == other.name
            np.testing.assert_allclose(of_replicas(one), of_replicas(other), **tolerance)
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (SCALE / 8, 3, 3)
    if is_legacy:
        return
    opt.finalize_variable_values(variables)
    plain.finalize_variable_values(plain_variables)
    for one, other in zip(variables, plain_variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), **tolerance)


def dense_model(keras: ModuleType, opt: Any, policy: str = "float32", **settings: Any) -> Any:
    """Make a model of two layers, with the same weights at every call, and compile it."""
    # The initializer is not random, because random initializers of Keras 2.15 warn.
    layer = functools.partial(keras.layers.Dense, kernel_initializer="ones", dtype=policy)
    model = keras.Sequential([keras.Input([3]), layer(4, activation="relu"), layer(1)])
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=weight.shape) for weight in model.weights])
    model.compile(opt, **{"loss": "mse"} | settings)
    return model


def composed(
    keras: ModuleType, call: Callable[[Any, Any], Any], base: str = "Layer", settings: Any = None, **parts: Any
) -> Any:
    """Make a layer, or a model, with parts as its attributes; its `call` is a function of it and of the input.

    `settings` are what the constructor of the layer or model takes.
    """

    class Composed(keras.Model if base == "Model" else keras.layers.Layer):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__(**settings or {})
            for name, part in parts.items():
                setattr(self, name, part)

        def call(self, x: Any) -> Any:
            return tf.autograph.experimental.do_not_convert(call)(self, x)

    return Composed()


class Halving(tfmp.LossScaleManager):
    """A manager that a user wrote, as scripts for tf.contrib do. It declares no lower bound for its scale."""

    def __init__(self, loss_scale: float = SCALE) -> None:
        super().__init__()
        self._start, self.loss_scale = loss_scale, tf.Variable(loss_scale, trainable=False)

    def get_config(self) -> dict[str, Any]:
        return {"loss_scale": self._start}

    def get_loss_scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.loss_scale)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        return self.loss_scale.assign(tf.where(finite_grads, self.loss_scale, self.loss_scale / 2)).op


def linear_model(keras: ModuleType, opt: Any, **settings: Any) -> Any:
    """Make a model with one weight, which starts at 0 and whose gradient is the target; `fit_linear` trains it."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input([1]), layer])
    model.compile(opt, loss=lambda target, output: target * output, **settings)
    return model


def fit_linear(model: Any, targets: Sequence[float], **settings: Any) -> None:
    """Fit a `linear_model` with one target in each step."""
    y = np.float32(targets).reshape(-1, 1)
    model.fit(np.ones_like(y), y, **{"batch_size": 1, "shuffle": False, "verbose": 0} | settings)


def operations(function: Callable[..., None], *args: Any) -> list[Any]:
    """Return the operations in the graph of a function, and in those of the functions that it calls."""
    graph = tf.function(function).get_concrete_function(*args).graph.as_graph_def()
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]


def compiled_calls(function: Callable[..., None], *args: Any) -> list[str]:
    """Return the name of the program for each call, in the graph of a function, of one that XLA compiles."""
    return [node.attr["f"].func.name for node in operations(function, *args) if "_XlaMustCompile" in node.attr]


def num_programs(function: Callable[..., None], *args: Any) -> int:
    """Return the number of programs that XLA compiles in the graph of a function."""
    return len({*compiled_calls(function, *args)})


def of_replicas(variable: Any) -> list[np.ndarray]:
    """Return the values of a variable on each replica of the current strategy."""
    parts = tf.distribute.get_strategy().experimental_local_results(of_tensorflow(variable))
    return [part.numpy() for part in parts]


def values(variables: Sequence[Any]) -> list[Any]:
    """Return the variables' values."""
    return [variable.numpy().tolist() for variable in variables]


def variables_of(opt: Any) -> list[Any]:
    """Return the variables of an optimizer, for which a legacy one has a method."""
    return list(opt.variables() if callable(opt.variables) else opt.variables)


def values_but_state(opt: Any) -> list[Any]:
    """Return the values of an optimizer's variables, except those of the loss scale's state."""
    return values([variable for variable in variables_of(opt) if _name(variable) not in _STATE])


def state(opt: Any, *names: str) -> list[Any]:
    """Return the values of variables of an optimizer, such as those of the loss scale's state."""
    held = {_name(variable): variable.numpy() for variable in opt.variables}
    return [held[name] for name in names]


def _options(kind: str, keras: ModuleType) -> dict[str, dict[str, Any]]:
    options = {
        "plain": {},
        "clipnorm": {"clipnorm": 0.5},
        "clipvalue": {"clipvalue": 0.5},
        "global_clipnorm": {"global_clipnorm": 0.5},
        "schedule": {"learning_rate": keras.optimizers.schedules.PolynomialDecay(0.5, 10)},
    }
    if "legacy" in kind:
        options |= {"momentum": {"momentum": 0.5}, "halved": {"gradient_transformers": [_halved]}}
        return {name: {"legacy": True, **each} for name, each in options.items()}
    options |= {
        "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        "weight_decay": {"weight_decay": 0.25},
    }
    if kind == "keras3":
        options["accumulation"] = {"gradient_accumulation_steps": 2}
        options["clipped accumulation"] = {"global_clipnorm": 0.5, "gradient_accumulation_steps": 2}
    return options


def _halved(grads_and_vars: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(grad / 2, variable) for grad, variable in grads_and_vars]


def _name(variable: Any) -> str:
    # Keras 2's names end in `:0`.
    return str(variable.name).split(":")[0]
