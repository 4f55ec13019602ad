"""Registers tfmp's classes with Keras, so that saved models load, without importing TensorFlow or Keras."""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any


def register_when_imported() -> None:
    """Register the classes that saved models name with `keras` and `tf_keras`, at once or when these are imported.

    This function does not import them itself.
    """
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


def _loss_scale_optimizer(keras: ModuleType) -> Any:  # noqa: ANN401 - a class with bases of any Keras
    # Not at the top of the file, because this module imports TensorFlow.
    from tfmp.optimizers.front_ends import front_end_of

    return front_end_of(keras)


def _recompute(keras: ModuleType) -> Any:  # noqa: ANN401 - a class with bases of any Keras
    # Not at the top of the file, for the same reason.
    from tfmp.recomputation.layers.layer import recompute_class

    return recompute_class(keras)


def _recomputed_model(keras: ModuleType) -> Any:  # noqa: ANN401 - a class with bases of any Keras
    # Not at the top of the file, for the same reason.
    from tfmp.recomputation.layers.same_class import recomputed_class

    return recomputed_class(keras, keras.Model)


def _half_state(keras: ModuleType) -> Any:  # noqa: ANN401 - a class with bases of any Keras
    # Not at the top of the file, for the same reason.
    from tfmp.optimizer_state.half_state import half_state_base

    return half_state_base(keras)


#: The functions that import a class for one version of Keras, by the name that saved models have for it.
_CLASSES: dict[str, Callable[[ModuleType], Any]] = {
    "HalfState": _half_state,
    "LossScaleOptimizer": _loss_scale_optimizer,
    "Recompute": _recompute,
    "RecomputedModel": _recomputed_model,
}


class _ClassOnDemand:
    """Stands for a class in the registry of Keras, and imports the class when a saved model needs it."""

    def __init__(self, keras: ModuleType, find: Callable[[ModuleType], Any]) -> None:
        self._keras = keras
        self._find = find

    def from_config(self, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Import the class, and create an object from the configuration that its `get_config` returned."""
        return self._find(self._keras).from_config(config, custom_objects)
