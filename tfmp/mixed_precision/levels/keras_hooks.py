"""What levels need of Keras that is not public: to see layers before they are made, and models when they are compiled.

Keras has a global policy, but it is one for all classes of layers, Keras 2 has it for all threads, and
`clear_session()` takes it back. So the base class of all layers is asked in its stead: from the first level that a
program uses, `Layer.__init__` is wrapped, and so is `Model.compile`. Outside of levels these do what they did before. A
Keras that is imported later is wrapped then. So are the `losses` of layers in Keras 3, which it cannot add up if some
are in half precision.
"""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import tensorflow as tf
import wrapt

from tfmp.any_keras.internals import is_compiled, is_layer_of_tf1, layer_class_of_graphs
from tfmp.any_keras.which import is_keras2
from tfmp.mixed_precision.keras_layers import called_layers_of, compute_dtype, in_float32
from tfmp.mixed_precision.levels.level import SETTINGS, Level, policy_of

#: A layer or model of any Keras.
_Layer: TypeAlias = Any


class _Levels(threading.local):
    """The levels that are open in a thread, the innermost at the end, and how many layers asked for one."""

    def __init__(self) -> None:
        self.open: list[Level] = []
        self.num_layers = 0


levels = _Levels()


_wrapping = threading.Lock()


def wrap_keras() -> None:
    """Let layers of every Keras ask for the level when they are made, and `compile` warn of unscaled losses."""
    with _wrapping:
        _wrap_when_imported()


@functools.cache
def _wrap_when_imported() -> None:
    for package in ("keras", "tf_keras"):
        wrapt.register_post_import_hook(_wrap, package)


def _wrap(keras: ModuleType) -> None:
    # What is imported may be an empty package that an uninstalled Keras left behind.
    if not hasattr(keras, "layers"):
        return
    layer = keras.layers.Layer
    layer.__init__ = _with_policy(keras, layer.__init__)
    if is_keras2(keras):
        v1 = layer_class_of_graphs(keras)
        v1.__init__ = _with_policy(keras, v1.__init__)
    else:
        layer.losses = in_float32(layer.losses)
    # Keras looks whether a class has another `compile` than the class that this is defined in.
    trainer = next(each for each in keras.Model.__mro__ if "compile" in vars(each))
    trainer.compile = _warning_of_unscaled_loss(keras, trainer.compile)


def _with_policy(keras: ModuleType, init: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def with_policy(self: _Layer, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - what a layer takes
        if levels.open and _takes_policies(keras, self):
            levels.num_layers += 1
            bound = signature.bind(self, *args, **kwargs)
            if bound.arguments.get("dtype") is None:
                bound.arguments["dtype"] = policy_of(keras, type(self), _settings_of_caller(self), levels.open[-1])
            args, kwargs = bound.args[1:], bound.kwargs
        init(self, *args, **kwargs)

    # Keras 3 looks at the arguments, and not at what was wrapped.
    with_policy.__signature__ = signature  # type: ignore[attr-defined] # `inspect` reads it
    return with_policy


def _settings_of_caller(layer: _Layer) -> dict[str, Any]:
    """Return the settings that a layer is being made with, by their names, as far as it is given them.

    Subclasses set their attributes after `Layer.__init__`, so they are looked up in the `__init__` that called this
    one.
    """
    settings: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        # Reading its variables keeps alive what a frame holds, so those of other functions are not read.
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is layer:
            variables = frame.f_locals
            settings = {**{name: variables[name] for name in SETTINGS if variables.get(name) is not None}, **settings}
        frame = frame.f_back
    return settings


def _takes_policies(keras: ModuleType, layer: _Layer) -> bool:
    # In Keras 2, metrics are layers.
    return not is_layer_of_tf1(layer) and not isinstance(layer, keras.metrics.Metric)


def _warning_of_unscaled_loss(keras: ModuleType, compile_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_model)
    def warning(self: _Layer, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - what compile takes
        compile_model(self, *args, **kwargs)
        warn_of_unscaled_loss(keras, self)

    return warning


def warn_of_unscaled_loss(keras: ModuleType, model: _Layer) -> None:
    """Warn if a model is compiled with an optimizer that does not scale the loss, and has layers that need it."""
    # A layer that is no model may have an `optimizer` that means anything.
    if not is_compiled(keras, model) or _scales(keras, getattr(model, "optimizer", None)):
        return
    half = [each for each in called_layers_of(keras, model) if compute_dtype(keras, each) == "float16"]
    if not half:
        return
    inner = [each for each in half if each is not model and not isinstance(each, keras.layers.InputLayer)]
    names = [each.name for each in inner] or [model.name]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warnings.warn(
        f"the model {model.name!r} computes in float16 ({named}), and is compiled with an optimizer that does not "
        "scale the loss: small gradients become 0. Pass compile a tfmp.LossScaleOptimizer around the optimizer.",
        stacklevel=3,
    )


def _scales(keras: ModuleType, optimizer: Any) -> bool:  # noqa: ANN401 - of any Keras, or what a model puts there
    if is_keras2(keras):
        # It may be several.
        return all(hasattr(each, "get_scaled_loss") for each in tf.nest.flatten(optimizer))
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return True
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or bool(optimizer.loss_scale_factor)
