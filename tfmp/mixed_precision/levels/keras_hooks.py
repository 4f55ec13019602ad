"""What levels need of Keras that is not public: to see layers before they are made, and models when they are compiled.

Keras has a global policy, but it is one for all classes of layers, Keras 2 has it for all threads, and
`clear_session()` takes it back. So the base class of all layers is asked in its stead: from the first level that a
program uses, `Layer.__new__` and `Layer.__init__` are wrapped, and so is `Model.compile`. Outside of levels these do
what they did before. A Keras that is imported later is wrapped then.
"""

import functools
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import wrapt

from tfmp.keras_layers import layers_of
from tfmp.mixed_precision.levels.keras_policies import policy_of
from tfmp.mixed_precision.levels.level import Level
from tfmp.which_keras import is_keras2

#: A layer or model of any Keras.
_Layer: TypeAlias = Any

_ACTIVATION = "_tfmp_activation"


class _Levels(threading.local):
    """The levels that are open in a thread, the innermost at the end."""

    def __init__(self) -> None:
        self.open: list[Level] = []


levels = _Levels()


@functools.cache
def wrap_keras() -> None:
    """Let the layers of every Keras ask for the level when they are made, and models look at it when compiled."""
    for package in ("keras", "tf_keras"):
        wrapt.register_post_import_hook(_wrap, package)


def _wrap(keras: ModuleType) -> None:
    # What is imported may be a directory that an uninstalled Keras left behind.
    if not hasattr(keras, "layers"):
        return
    layer = keras.layers.Layer
    layer.__new__ = _remembering_activation(layer.__new__)
    layer.__init__ = _with_policy(keras, layer.__init__)
    if is_keras2(keras):
        # In graphs of TensorFlow 1, Keras 2 swaps the base class.
        v1 = importlib.import_module(f"{keras.__name__}.src.engine.base_layer_v1").Layer
        v1.__init__ = _with_policy(keras, v1.__init__)
    keras.Model.compile = _warning_of_unscaled_loss(keras, keras.Model.compile)


def _remembering_activation(new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def remembering(cls: type, *args: Any, **kwargs: Any) -> _Layer:  # noqa: ANN401 - what the class takes
        layer = new(cls, *args, **kwargs)
        if levels.open and isinstance(layer, cls):
            layer.__dict__[_ACTIVATION] = _argument(cls, args, kwargs, "activation")
        return layer

    return remembering


def _with_policy(keras: ModuleType, init: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def with_policy(self: _Layer, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - what a layer takes
        activation = self.__dict__.pop(_ACTIVATION, None)
        if levels.open and _takes_policies(keras, self):
            given = signature.bind(self, *args, **kwargs)
            if given.arguments.get("dtype") is None:
                given.arguments["dtype"] = policy_of(keras, type(self), activation, levels.open[-1])
            args, kwargs = given.args[1:], given.kwargs
        init(self, *args, **kwargs)

    # Keras 3 looks at the arguments, and not at what was wrapped.
    with_policy.__signature__ = signature  # type: ignore[attr-defined]
    return with_policy


def _argument(cls: type, args: Any, kwargs: Any, name: str) -> Any:  # noqa: ANN401
    try:
        return inspect.signature(cls).bind_partial(*args, **kwargs).arguments.get(name)
    except TypeError:
        # The class itself will say what is wrong with its arguments.
        return None


def _takes_policies(keras: ModuleType, layer: _Layer) -> bool:
    # In Keras 2, metrics are layers. The layers of tf.compat.v1.layers take the type of their inputs.
    is_v1 = any("legacy_tf_layers" in each.__module__ for each in type(layer).__mro__)
    return not is_v1 and not isinstance(layer, keras.metrics.Metric)


def _warning_of_unscaled_loss(keras: ModuleType, compile_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_model)
    def warning(self: _Layer, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - what compile takes
        compile_model(self, *args, **kwargs)
        warn_of_unscaled_loss(keras, self)

    return warning


def warn_of_unscaled_loss(keras: ModuleType, model: _Layer) -> None:
    """Warn if a model is compiled with an optimizer that does not scale the loss, and has layers that need it.

    Args:
        keras: The package that the model is of.
        model: The model.
    """
    optimizer = getattr(model, "optimizer", None)
    half = [each for each in layers_of(model) if each.compute_dtype == "float16"]
    if optimizer is None or not half or _scales(keras, optimizer):
        return
    # The model itself comes first.
    names = [each.name for each in half[1:] if not isinstance(each, keras.layers.InputLayer)] or [model.name]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warnings.warn(
        f"the model {model.name!r} computes in float16 ({named}), and is compiled with an optimizer that does not "
        "scale the loss: small gradients become 0. Pass compile a tfmp.LossScaleOptimizer around the optimizer.",
        stacklevel=3,
    )


def _scales(keras: ModuleType, optimizer: Any) -> bool:  # noqa: ANN401 - of any Keras
    if is_keras2(keras):
        return hasattr(optimizer, "get_scaled_loss")
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or bool(optimizer.loss_scale_factor)
