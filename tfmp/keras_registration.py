"""Lets every Keras find the wrapper that a saved model names, and imports the wrapper only then."""

import importlib
import importlib.util
from types import ModuleType
from typing import Any


class _FrontEndOnDemand:
    """Stands for a front-end in a Keras' registry until a saved model names it; then the front-end takes its place.

    Args:
        keras: The Keras.
    """

    def __init__(self, keras: ModuleType) -> None:
        self._keras = keras

    def from_config(self, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Import the front-end, and make an optimizer of it.

        Args:
            config: What its `get_config` returned.
            custom_objects: Classes that are not registered, by their names.

        Raises:
            ImportError: The Keras is too old.
        """
        # Not at the top: it imports TensorFlow.
        from tfmp.optimizers.base import front_end_of

        return front_end_of(self._keras).from_config(config, custom_objects)


def register_when_imported() -> None:
    """Register the wrapper with `keras` and `tf_keras`: now if they are imported already, else once they are.

    Neither is imported for it.
    """
    # TensorFlow requires wrapt. Where that is not installed, there is no Keras on TensorFlow to register with.
    if importlib.util.find_spec("wrapt") is not None:
        wrapt = importlib.import_module("wrapt")
        for package in ("keras", "tf_keras"):
            wrapt.register_post_import_hook(_register, package)


def _register(keras: ModuleType) -> None:
    # An error here would end the user's `import keras`. What only has the name, such as a directory left behind, is no
    # Keras.
    if hasattr(getattr(keras, "saving", None), "register_keras_serializable"):
        keras.saving.register_keras_serializable(package="tfmp", name="LossScaleOptimizer")(_FrontEndOnDemand(keras))
