"""Shows what a skipped step does to the optimizers of TensorFlow 2's libraries: bare, in Keras' own wrapper and tfmp's.

    python -m benchmarks.legacy_optimizers

Each optimizer takes ten steps, and the gradients of the first step, the sixth or none overflow. The result should be
that of the bare optimizer without that step, so the table shows the largest difference of a weight from it, or of an
average of weights. The packages are those of the tox environment `works_with_keras2`.
"""

import argparse
import functools
import importlib
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import report

#: The number of steps, and which of them overflows.
STEPS, OVERFLOW = 10, 5

#: The scale that the wrappers start from.
SCALE = 2.0**10


class Case(NamedTuple):
    """An optimizer of a library."""

    #: The package to import it from.
    library: str
    #: The package whose layers and variables it trains: "keras" or "tf_keras".
    keras: str
    #: Makes the optimizer, given the library, its Keras and the model to train.
    make: Callable[[Any, Any, Any], Any]


class Run(NamedTuple):
    """The end of a training."""

    variables: list[tf.Variable]
    weights: list[np.ndarray]
    #: The averages of the weights, for an optimizer that keeps some.
    averages: list[np.ndarray]
    #: The values of the optimizer's variables, without those of a wrapper.
    state: list[np.ndarray]
    #: The weights and the state directly before and after the step that overflowed, if there was one.
    around_overflow: list[list[np.ndarray]]
    optimizer: Any


def _of_transformers(library: Any, **settings: Any) -> Any:  # noqa: ANN401 - of a library that may be missing
    return library.create_optimizer(1e-2, num_train_steps=20, num_warmup_steps=2, **settings)[0]


def _of_models(library: Any, kind: str, **settings: Any) -> Any:  # noqa: ANN401 - of a library that may be missing
    """Make an optimizer by the factory of TF-models, with a schedule and a warm-up."""
    config = library.OptimizationConfig(
        {
            "optimizer": {"type": kind, kind: settings},
            "learning_rate": {
                "type": "polynomial",
                "polynomial": {"initial_learning_rate": 1e-2, "decay_steps": 20, "end_learning_rate": 0.0},
            },
            "warmup": {"type": "linear", "linear": {"warmup_steps": 2}},
        }
    )
    factory = library.OptimizerFactory(config)
    return factory.build_optimizer(factory.build_learning_rate())


def _averaged(library: Any, model: Any) -> Any:  # noqa: ANN401 - of a library that may be missing
    opt = library.ExponentialMovingAverage(_of_models(library, "adamw", weight_decay_rate=0.01))
    opt.shadow_copy(model)
    return opt


#: Makes an optimizer, given its library, the Keras of the library, and the model to train.
_Make = Callable[[Any, Any, Any], Any]

_TRANSFORMERS: dict[str, _Make] = {
    "create_optimizer": lambda t, _, __: _of_transformers(t, weight_decay_rate=0.01),
    "create_optimizer, clipped": lambda t, _, __: _of_transformers(t, weight_decay_rate=0.01, adam_global_clipnorm=0.1),
    "create_optimizer, no decay": lambda t, _, __: _of_transformers(t),
}

_ADDONS: dict[str, _Make] = {
    "AdaBelief": lambda t, _, __: t.optimizers.AdaBelief(0.01),
    "AdamW": lambda t, _, __: t.optimizers.AdamW(weight_decay=1e-3, learning_rate=0.01),
    "COCOB": lambda t, _, __: t.optimizers.COCOB(),
    "ConditionalGradient": lambda t, _, __: t.optimizers.ConditionalGradient(0.9, 0.01),
    "LAMB": lambda t, _, __: t.optimizers.LAMB(0.01),
    "LazyAdam": lambda t, _, __: t.optimizers.LazyAdam(0.01),
    "Lookahead": lambda t, k, _: t.optimizers.Lookahead(k.optimizers.legacy.Adam(0.01), sync_period=3),
    "Lookahead(RectifiedAdam)": lambda t, _, __: t.optimizers.Lookahead(t.optimizers.RectifiedAdam(0.01), 3),
    "MovingAverage": lambda t, k, _: t.optimizers.MovingAverage(k.optimizers.legacy.SGD(0.05)),
    "MultiOptimizer": lambda t, k, model: t.optimizers.MultiOptimizer(
        [(k.optimizers.legacy.Adam(0.01), model.layers[0]), (k.optimizers.legacy.SGD(0.05), model.layers[1:])]
    ),
    "NovoGrad": lambda t, _, __: t.optimizers.NovoGrad(0.01),
    "ProximalAdagrad": lambda t, _, __: t.optimizers.ProximalAdagrad(0.01),
    "RectifiedAdam": lambda t, _, __: t.optimizers.RectifiedAdam(0.01),
    "SGDW": lambda t, _, __: t.optimizers.SGDW(weight_decay=1e-3, learning_rate=0.05, momentum=0.9),
    "SWA": lambda t, k, _: t.optimizers.SWA(k.optimizers.legacy.SGD(0.05), 2, 2),
    "SWA(Lookahead)": lambda t, k, _: t.optimizers.SWA(
        t.optimizers.Lookahead(k.optimizers.legacy.Adam(0.01), sync_period=3), 2, 2
    ),
    "Yogi": lambda t, _, __: t.optimizers.Yogi(0.01),
}

_MODELS: dict[str, _Make] = {
    "adamw": lambda t, _, __: _of_models(t, "adamw", weight_decay_rate=0.01, gradient_clip_norm=0.0),
    "adamw, clipped": lambda t, _, __: _of_models(t, "adamw", weight_decay_rate=0.01, gradient_clip_norm=0.1),
    "adamw, moving average": lambda t, _, model: _averaged(t, model),
    "lamb": lambda t, _, __: _of_models(t, "lamb", weight_decay_rate=0.01),
    "adam": lambda t, _, __: _of_models(t, "adam"),
    "sgd": lambda t, _, __: _of_models(t, "sgd", momentum=0.9),
    "rmsprop": lambda t, _, __: _of_models(t, "rmsprop"),
    "lars": lambda t, _, __: _of_models(t, "lars"),
    "adagrad": lambda t, _, __: _of_models(t, "adagrad"),
}

#: The optimizers, by their library and what a user calls them.
CASES = {
    f"{title}: {name}": Case(library, keras, make)
    for title, library, keras, makes in [
        ("transformers", "transformers", "tf_keras", _TRANSFORMERS),
        ("Addons", "tensorflow_addons", "keras", _ADDONS),
        ("TF-models", "official.modeling.optimization", "keras", _MODELS),
    ]
    for name, make in makes.items()
}


@functools.cache
def load(package: str) -> ModuleType:
    """Import a package; what these old packages warn of when they are imported is not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(package)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it.

    Examples:
        >>> is_installed("tensorflow"), is_installed("no_such_package")
        (True, False)
    """
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def model_for(keras: ModuleType) -> Any:  # noqa: ANN401 - of either package
    """Make a small model whose weights have the usual names, and always the same values."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Dense(4, kernel_initializer="zeros", input_shape=(3,), name="dense"),
            layers.LayerNormalization(name="layer_norm"),
            layers.Dense(1, kernel_initializer="zeros", name="output"),
        ]
    )
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=weight.shape) for weight in model.weights])
    return model


def train(case: Case, wrap: Callable[..., Any] | None, *, factors: Sequence[float], compiled: bool) -> Run:
    """Take one step for each factor, by which its loss is multiplied: infinity lets its gradients overflow.

    `wrap` is a class of wrappers, None for the bare optimizer; `compiled` steps are in a `tf.function`.
    """
    keras = load(case.keras)
    model = model_for(keras)
    inner = opt = case.make(load(case.library), keras, model)
    if wrap is not None:
        opt = wrap(inner, initial_scale=SCALE)
    variables = model.trainable_variables
    rng = np.random.default_rng(0)

    def step(x: tf.Tensor, factor: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0)) * factor
            loss = loss if wrap is None else opt.get_scaled_loss(loss)
        grads = tape.gradient(loss, variables)
        grads = grads if wrap is None else opt.get_unscaled_gradients(grads)
        opt.apply_gradients(zip(grads, variables, strict=True))

    take = tf.function(step) if compiled else step
    around: list[list[np.ndarray]] = []
    for index in range(STEPS):
        x = tf.constant(rng.normal(size=(8, 3)), tf.float32)
        if index >= len(factors) or factors[index] == 0:
            continue
        is_overflow = math.isinf(factors[index])
        if is_overflow:
            around.append([*_values(variables), *_values(_state(inner))])
        take(x, tf.constant(factors[index]))
        if is_overflow:
            around.append([*_values(variables), *_values(_state(inner))])
    state = _state(inner)
    averages = [variable for variable in state if "average" in variable.name]
    return Run(variables, _values(variables), _values(averages), _values(state), around, opt)


def factors(overflow: float, at: int = OVERFLOW) -> list[float]:
    """Return the factors of all steps, with this one for the step that overflows; 0 leaves that step out.

    Examples:
        >>> factors(math.inf)
        [1.0, 1.0, 1.0, 1.0, 1.0, inf, 1.0, 1.0, 1.0, 1.0]
    """
    return [overflow if index == at else 1.0 for index in range(STEPS)]


def difference(run: Run, other: Run) -> float:
    """Return the largest difference of a weight or an average of weights; NaN if one is not finite."""
    pairs = zip([*run.weights, *run.averages], [*other.weights, *other.averages], strict=True)
    return float(np.max([np.max(np.abs(one - two)) for one, two in pairs]))


def _state(opt: Any) -> list[tf.Variable]:  # noqa: ANN401 - of either package
    """Return all variables of a bare optimizer and of those inside it."""
    parts = [spec["optimizer"] for spec in getattr(opt, "optimizer_specs", [])]
    inside = getattr(opt, "_optimizer", None)
    own = opt.weights if hasattr(opt, "weights") else opt.variables
    # Wrappers of Addons list the variables of the optimizer inside them too; the moving average of TF-models does not.
    found = [*own, *(variable for part in [*parts, *([inside] if inside else [])] for variable in _state(part))]
    return list({id(variable): variable for variable in found}.values())


def _values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables]


def _row(name: str, case: Case, *, compiled: bool) -> list[str]:
    """Return a row of the table."""
    own = load(case.keras).mixed_precision.LossScaleOptimizer
    right: dict[int | None, Run] = {
        at: train(case, None, factors=factors(0.0, at), compiled=compiled) for at in (0, OVERFLOW)
    }
    right[None] = train(case, None, factors=factors(1.0), compiled=compiled)

    def cell(wrap: Callable[..., Any] | None, at: int | None) -> str:
        of_steps = factors(1.0) if at is None else factors(math.inf, at)
        try:
            found = difference(train(case, wrap, factors=of_steps, compiled=compiled), right[at])
        except Exception as error:
            # Whatever a library raises is what the table shows.
            return f"fails: {type(error).__name__}"
        return "not finite" if math.isnan(found) else f"{found:.1e}" if found else "0"

    return [name, cell(None, OVERFLOW), *(cell(wrap, at) for wrap in (own, tfmp.LossScaleOptimizer) for at in right)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="show the optimizers whose names contain this text")
    parser.add_argument("--eager", action="store_true", help="take the steps eagerly instead of in a tf.function")
    options = parser.parse_args(arguments)
    report.printed_conditions()
    rows = []
    for name, case in CASES.items():
        if options.only not in name:
            continue
        if not (is_installed(case.library) and is_installed(case.keras)):
            print(f"{name}: needs {case.library}, which is not installed", file=sys.stderr)
            continue
        rows.append(_row(name, case, compiled=not options.eager))
    places = ["step 1", f"step {OVERFLOW + 1}", "none"]
    header = ["optimizer", "bare", *(f"{name}, {place}" for name in ("Keras' own", "tfmp") for place in places)]
    print(report.table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
