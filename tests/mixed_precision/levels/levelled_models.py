"""Models of any Keras that are built under a level or set to one, and what tests ask about their layers."""

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

import tfmp

#: What Keras calls the policy of a layer that needs no exception, by the names of the levels.
POLICIES = {
    f"{level}{suffix}": policy
    for suffix, half in (("", "float16"), ("-bfloat16", "bfloat16"))
    for level, policy in (("O0", "float32"), ("O1", f"mixed_{half}"), ("O2", f"mixed_{half}"), ("O3", half))
}


def policy(layer: Any) -> str:
    """Return the name of the policy of a layer."""
    return str(layer.dtype_policy.name)


def policies(model: Any) -> list[tuple[str, str, str, str]]:
    """Return of a model and all layers in it the class, the policy, and the types it computes and stores in."""
    # Keras 2 makes layers of functions, which compute in the type that they are given.
    others = ("InputLayer", "TFOpLambda", "SlicingOpLambda")
    layers = {id(layer): layer for layer in model._flatten_layers() if type(layer).__name__ not in others}
    return [
        (type(layer).__name__, policy(layer), layer.compute_dtype, layer.variable_dtype) for layer in layers.values()
    ]


def layer_policies(model: Any) -> list[tuple[str, str, str, str]]:
    """Return the policies of the layers in a model; those of models, which their configurations lack, left out."""
    return [each for each in policies(model) if each[0] not in ("Functional", "Model", "Sequential")]


def stored(model: Any) -> set[str]:
    """Return the types of the floating-point weights of a model."""
    return {tf.as_dtype(weight.dtype).name for weight in model.weights if tf.as_dtype(weight.dtype).is_floating}


def values(model: Any) -> list[Any]:
    """Return the weights of a model with their types."""
    return [(tf.as_dtype(weight.dtype).name, tf.convert_to_tensor(weight).numpy().tolist()) for weight in model.weights]


def outputs(model: Any, *inputs: Any) -> list[Any]:
    """Return the outputs of a model with their types."""
    return [(each.dtype.name, each.numpy().tolist()) for each in tf.nest.flatten(model(*inputs))]


def with_given_weights(model: Any) -> Any:
    """Give the trained variables of a model values that are not random; return the model."""
    for index, weight in enumerate(model.trainable_variables):
        size = int(np.prod(weight.shape))
        weight.assign(
            (np.cos(index + np.arange(size)).reshape(weight.shape) / 2).astype(tf.as_dtype(weight.dtype).name)
        )
    return model


def gradients(model: Any, *inputs: Any) -> list[tf.Tensor]:
    """Run a model forward and backward in training; return its gradients, of which none is missing."""
    weights = [each if isinstance(each, tf.Variable) else each.value for each in model.trainable_variables]
    with tf.GradientTape() as tape:
        outputs = [each for each in tf.nest.flatten(model(*inputs, training=True)) if tf.is_tensor(each)]
        loss = tf.add_n([tf.reduce_mean(tf.cast(each, tf.float32) ** 2) for each in outputs])
    found = tape.gradient(loss, weights)
    assert all(each is not None for each in found)
    return list(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """What makes a model, a batch for it, and the names of the classes of its layers that are in float32 at O1."""

    make: Callable[[ModuleType], Any]
    batch: np.ndarray
    o1: Sequence[str] = ()

    def built(self, keras: ModuleType, level: str | None = None) -> Any:
        """Return the model, made under a level if one is given, after it was called on the batch."""
        if level is None:
            model = self.make(keras)
        else:
            with tfmp.precision(level):
                model = self.make(keras)
        model(self.batch)
        return with_given_weights(model)


def _sequential(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input([3]), layers.Dense(4, "relu", name="body"), layers.Dense(2, name="head")])


def _unbuilt(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Dense(4, name="body"), layers.BatchNormalization(), layers.Dense(2, "softmax")])


def _functional(keras: ModuleType) -> Any:
    inputs = keras.Input([3])
    x = keras.layers.Dense(4, name="body")(inputs)
    x = keras.layers.LayerNormalization()(x) + x
    x = keras.layers.Dropout(0.5)(x * 2.0)
    return keras.Model(inputs, [keras.layers.Dense(2, name="head")(x), keras.layers.Activation("softmax")(x)])


def _nested(keras: ModuleType) -> Any:
    """Return a model in whose inner models one layer is called twice."""
    inner = keras.Sequential([keras.Input([3]), keras.layers.Dense(3, name="inner_dense")], name="inner")
    inputs = keras.Input([3])
    middle = keras.Model(inputs, keras.layers.Add()([inner(inputs), inner(inner(inputs))]), name="middle")
    return keras.Sequential([keras.Input([3]), middle, keras.layers.Dense(2, name="head")])


def subclassed(keras: ModuleType) -> Any:
    """Return a model with a layer that holds layers, a sum with normalized values, and a weight of its own."""

    class Block(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(name="block")
            self.dense = keras.layers.Dense(3, name="dense")
            self.norms = [keras.layers.LayerNormalization(name="norm"), keras.layers.BatchNormalization(name="batch")]

        def call(self, x: Any) -> Any:
            x = self.dense(x)
            for norm in self.norms:
                x = x + norm(x)
            return x

    class Net(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(name="net")
            self.block = Block()
            self.head = keras.layers.Dense(2, name="head")
            self.shift = self.add_weight(shape=[2], initializer="ones", name="shift")

        def call(self, x: Any) -> Any:
            return self.head(self.block(x)) + tf.cast(self.shift, self.compute_dtype)

    return Net()


def _attention(keras: ModuleType) -> Any:
    inputs = keras.Input([3], dtype="int32")
    x = keras.layers.Embedding(8, 4, name="embed")(inputs)
    x = keras.layers.LayerNormalization(name="norm")(x + keras.layers.MultiHeadAttention(2, 2, name="attend")(x, x))
    return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x))


def _recurrent(keras: ModuleType) -> Any:
    layers = keras.layers
    cells = [layers.SimpleRNNCell(3), layers.GRUCell(3)]
    return keras.Sequential(
        [
            keras.Input([3, 2]),
            layers.LSTM(3, return_sequences=True, name="lstm"),
            layers.Bidirectional(layers.GRU(3, return_sequences=True), name="both"),
            layers.RNN(cells, return_sequences=True, name="stacked"),
            layers.TimeDistributed(layers.Dense(2, activation="softmax"), name="each"),
        ]
    )


def _convolutional(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([4, 4, 2]),
            layers.Conv2D(3, 2, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(name="mean"),
            layers.Dense(2, name="head"),
        ]
    )


_X = np.cos(np.arange(12, dtype=np.float32)).reshape(4, 3)
_IMAGES = np.cos(np.arange(64, dtype=np.float32)).reshape(2, 4, 4, 2)

CASES = {
    "sequential": Case(_sequential, _X),
    "sequential without an input": Case(_unbuilt, _X, ["Dense"]),
    "functional": Case(_functional, _X, ["Activation"]),
    "nested": Case(_nested, _X),
    "subclassed": Case(subclassed, _X),
    "attention": Case(_attention, np.array([[1, 2, 3], [4, 5, 6]]), ["GlobalAveragePooling1D"]),
    "recurrent": Case(_recurrent, np.cos(np.arange(12, dtype=np.float32)).reshape(2, 3, 2), ["Dense"]),
    "convolutional": Case(_convolutional, _IMAGES, ["GlobalAveragePooling2D"]),
}
