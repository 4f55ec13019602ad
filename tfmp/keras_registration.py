"""Registers tfmp's classes with Keras, so that saved models load, without importing TensorFlow or Keras."""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any


def register_when_imported() -> None:
    """Register the classes that saved models name with `keras` and `tf_keras`, at once or when others import these."""
    # TensorFlow requires wrapt. If wrapt is not installed, there is no Keras on TensorFlow to register with.
    if importlib.util.find_spec("wrapt") is not None:
        wrapt = importlib.import_module("wrapt")
        for package in ("keras", "tf_keras"):
            wrapt.register_post_import_hook(_register, package)


def _register(keras: ModuleType) -> None:
    # An error here would break the user's `import keras`. Hence this check: the imported package may be something else
    # that has the name of Keras, such as a directory that an uninstalled Keras left behind.
    if hasattr(getattr(keras, "saving", None), "register_keras_serializable"):
        for name, find in _CLASSES.items():
            keras.saving.register_keras_serializable(package="tfmp", name=name)(_ClassOnDemand(keras, find))


def _of(module: str) -> Any:  # noqa: ANN401 - a module, whose names type checkers do not know here
    # On demand, because these modules import TensorFlow.
    return importlib.import_module(f"tfmp.{module}")


#: The functions that import a class for one version of Keras, by the name that saved models have for it.
_CLASSES: dict[str, Callable[[ModuleType], Any]] = {
    "HalfState": lambda keras: _of("optimizer_state.half_state").half_state_base(keras),
    "LossScaleOptimizer": lambda keras: _of("hosts.front_ends").front_end_of(keras),
    "Recompute": lambda keras: _of("recomputation.layers.layer").recompute_class(keras),
    "RecomputedModel": lambda keras: _of("recomputation.layers.same_class").recomputed_class(keras, keras.Model),
}


class _ClassOnDemand:
    """Stands for a class in the registry of Keras, and imports the class when a saved model needs it."""

    def __init__(self, keras: ModuleType, find: Callable[[ModuleType], Any]) -> None:
        self._keras = keras
        self._find = find

    def from_config(self, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Import the class, and create an object from the configuration that its `get_config` returned."""
        return self._find(self._keras).from_config(config, custom_objects)
