"""Recompute: the front door to the recomputing layers of Keras 3, tf_keras and Keras 2."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from tfmp.any_keras.which import keras_of, module_for

if TYPE_CHECKING:
    from typing_extensions import Self


class Recompute:
    """Wraps a Keras layer or model: its activations are computed again for the gradients, instead of being kept.

    A model keeps every activation of its forward pass until the backward pass has used it. A block inside `Recompute`
    keeps only its inputs. When its gradients are computed, the block is called a second time. So the activations of a
    single block are in memory at any time, and a step takes the time of about one more forward pass. Wrap blocks that
    repeat, such as the layers of a transformer.

    The results, the gradients, and the changes of state are those of the block without recomputation. Dropout draws the
    same mask in both calls, and the moving statistics of BatchNormalization, the state of random number generators,
    metrics, and losses of `add_loss` count once. A block whose state cannot be put back is refused by name when it is
    called: with Keras 3 one that uses stateful ops of TensorFlow, such as `tf.random.normal`, itself; with Keras 2 also
    one with Dropout, in training.

    The wrapper is a layer of the same Keras as the block, with the same name, and is called in the same way. The
    weights belong to the block, and have the same paths as without it.

    Args:
        layer: The layer or model: of Keras 3, or of Keras 2 (Keras 2.15, tf_keras).
        name: The name of the wrapper; by default that of the layer.
        trainable: False to freeze the layer, as in every Keras layer.

    Raises:
        TypeError: `layer` is not a Keras layer.
        ValueError: `layer` is a `Recompute` itself.

    Examples:
        >>> import keras
        >>> import tfmp
        >>> block = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(2)], name="block")
        >>> inputs = keras.Input([4])
        >>> model = keras.Model(inputs, tfmp.Recompute(block)(inputs))
        >>> model.output_shape
        (None, 2)

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); `torch.utils.checkpoint`, which also
    replays the random numbers of the first call.

    Provisional: a minor version may change it.
    """

    if TYPE_CHECKING:
        # What Keras' base class gives, and a type checker would miss: it does not know which one `__new__` picks.
        layer: Any
        name: str

        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the layer takes and returns
            """Call the layer."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Self":  # noqa: ANN401 - the arguments of the constructor
        """Make an object of the class for the Keras of the layer."""
        if cls is Recompute:
            layer = args[0] if args else kwargs.get("layer")
            return cast("Self", super().__new__(_class_for(layer)))
        return super().__new__(cls)

    def __init__(self, layer: Any, *, name: str | None = None, trainable: bool = True) -> None:  # noqa: ANN401
        # The classes for each Keras have constructors of their own: only a subclass of the front door comes here.
        raise TypeError(
            f"{type(self).__name__} subclasses tfmp.Recompute, which only picks a class: wrap a layer instead."
        )

    # Otherwise `inspect.signature` and `help` would show the parameters of `__new__`: (*args, **kwargs).
    __new__.__wrapped__ = __init__  # type: ignore[attr-defined] # as functools.wraps sets it


def _class_for(layer: object) -> type[Recompute]:
    if isinstance(layer, Recompute):
        raise ValueError(f"the layer {layer.name!r} is a tfmp.Recompute already: wrap it once, or pass its `layer`.")
    keras = keras_of(layer, "layers.Layer")
    if keras is not None:
        return recompute_class(keras)
    raise TypeError(
        f"layer must be a layer or model of Keras, got {layer!r} of type {type(layer).__name__}: "
        "tfmp.recompute takes functions."
    )


def recompute_class(keras: ModuleType) -> type[Recompute]:
    """Return the class that wraps the layers of a Keras, importing it."""
    found: type[Recompute] = importlib.import_module(f"tfmp.recomputation.layers.{module_for(keras)}").Recompute
    return found
