"""Registers LossScaleOptimizer with Keras, so that saved models load, without importing TensorFlow or Keras."""

import importlib
import importlib.util
from types import ModuleType
from typing import Any


class _FrontEndOnDemand:
    """Stands for a front-end in the registry of Keras, and imports the front-end when a saved model needs it.

    A front-end is the class that implements `tfmp.LossScaleOptimizer` for one version of Keras.

    Args:
        keras: The imported package `keras` or `tf_keras`.
    """

    def __init__(self, keras: ModuleType) -> None:
        self._keras = keras

    def from_config(self, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Import the front-end, and create an optimizer of its class.

        Args:
            config: The configuration of the saved optimizer, which its `get_config` returned.
            custom_objects: Classes by their names, for classes in the configuration that Keras does not know.

        Raises:
            ImportError: This version of Keras is too old for tfmp.
        """
        # Not at the top of the file, because this module imports TensorFlow.
        from tfmp.optimizers.base import front_end_of

        return front_end_of(self._keras).from_config(config, custom_objects)


def register_when_imported() -> None:
    """Register `LossScaleOptimizer` with `keras` and `tf_keras`, at once or as soon as the program imports them.

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
        keras.saving.register_keras_serializable(package="tfmp", name="LossScaleOptimizer")(_FrontEndOnDemand(keras))
