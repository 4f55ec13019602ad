"""Models with recomputed layers train as without: rows of a model, each Keras and each way to run a step."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_models import (
    WAYS,
    Wrap,
    assert_close,
    data,
    dense,
    dense_block,
    dropout,
    fitted,
    is_keras3,
    model,
    names,
    plain,
    stateful_block,
    values,
)
from kerases import composed, for_every_keras

import tfmp

pytestmark = pytest.mark.usefixtures("same_rounding")

#: A model that is not compiled, and a batch to fit it to.
Subject = tuple[Any, Any]


def _blocks(block: Callable[..., Any]) -> Callable[[ModuleType, Wrap], Subject]:
    return lambda keras, wrap: (model(keras, wrap, block), data())


def _activated_block(keras: ModuleType, name: str) -> Any:
    """Make a block in which an activation and Dropout multiply by constants, one after the other."""
    return keras.Sequential([dense(keras, 16, "gelu"), dropout(keras, 0.1), dense(keras, 8)], name=name)


def _nested_block(keras: ModuleType, name: str) -> Any:
    return keras.Sequential([dense(keras, 8), tfmp.Recompute(stateful_block(keras, "inner"))], name=name)


def _losses_and_metrics(keras: ModuleType, name: str) -> Any:
    def call(self: Any, x: Any) -> Any:
        self.calls.update_state(1.0)
        self.add_loss(tf.reduce_mean(tf.cast(x, tf.float32) ** 2))
        return self.dense(x)

    regularized = dense(keras, 8, activity_regularizer="l2", kernel_regularizer="l1")
    return composed(keras, call, settings={"name": name}, dense=regularized, calls=keras.metrics.Sum(name="calls"))


def _without_training(keras: ModuleType, name: str) -> Any:
    """Make a layer whose sublayer takes `training` from the context, and which is built by its first call."""
    parts = {"dense": dense(keras, 8, "tanh"), "drop": dropout(keras, 0.5)}
    return composed(keras, lambda self, x: self.drop(self.dense(x)), settings={"name": name}, **parts)


def _masks(keras: ModuleType, wrap: Wrap) -> Subject:
    class Masked(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.supports_masking = True

        def call(self, x: Any, mask: Any = None) -> Any:
            return x * tf.cast(mask, x.dtype)[..., None]

    def recurrent(**settings: Any) -> Any:
        initializer = keras.initializers.GlorotUniform(seed=1)
        return keras.layers.SimpleRNN(4, kernel_initializer=initializer, **settings)

    ids = np.random.default_rng(1).integers(0, 6, [24, 5]) * (np.arange(5) < 3)
    inputs = keras.Input([5], dtype="int32")
    embedded = keras.layers.Embedding(6, 4, mask_zero=True, embeddings_initializer="ones")(inputs)
    block = recurrent(return_sequences=True)
    if not is_keras3(keras):
        # A Sequential of Keras 3 hands on no mask that its first layer does not support.
        block = keras.Sequential([dense(keras, 4, "tanh"), block], name="block")
    last = recurrent()(wrap(Masked())(wrap(block)(embedded)))
    return keras.Model(inputs, dense(keras, 1)(last)), (ids, np.ones([24, 1], np.float32))


def _stateful_recurrent(keras: ModuleType, wrap: Wrap) -> Subject:
    initializer = keras.initializers.GlorotUniform(seed=1)
    cell = keras.layers.SimpleRNN(4, stateful=True, kernel_initializer=initializer)
    inputs = keras.Input(batch_shape=[8, 2, 8])
    return keras.Model(inputs, dense(keras, 1)(wrap(cell)(inputs))), (np.stack([data()[0]] * 2, 1), data()[1])


def _frozen(keras: ModuleType, wrap: Wrap) -> Subject:
    """Make a model with a block that is frozen, so that gradients only pass through."""
    wrapped = wrap(stateful_block(keras))
    net = keras.Sequential([keras.Input([8]), dense(keras, 8), wrapped, dense(keras, 1)])
    wrapped.trainable = False
    return net, data()


def _partly_frozen(keras: ModuleType, wrap: Wrap) -> Subject:
    """Make a model of a frozen block in another one, both wrapped, with a layer in it that is trained."""
    inner = stateful_block(keras, "inner")
    # Keras 3.5 must know the shape of what stands first.
    block = keras.Sequential([keras.Input([8]), wrap(inner), dense(keras, 8, name="wide")], name="outer")
    net = keras.Sequential([keras.Input([8]), wrap(block), dense(keras, 1, name="head")])
    block.trainable = False
    inner.layers[-1].trainable = True
    return net, data()


def _thawed(keras: ModuleType, wrap: Wrap) -> Subject:
    """Make a model that was trained while its block was frozen, which is then thawed but for its first layer."""
    block = stateful_block(keras)
    net = keras.Sequential([keras.Input([8]), wrap(block), dense(keras, 1)])
    block.trainable = False
    fitted(net, **WAYS["eager"])
    block.trainable = True
    block.layers[0].trainable = False
    return net, data()


def _borrowing(keras: ModuleType, wrap: Wrap) -> Subject:
    """Make a model whose blocks change variables that are not their own, and compute with them before and after."""

    class Box:
        """Hides variables from Keras, which looks for them in attributes, lists and dictionaries only."""

        def __init__(self) -> None:
            self.calls = keras.Variable(0.0, trainable=False, name="calls")
            self.mean = keras.metrics.Mean()
            self.seeds = keras.random.SeedGenerator(1)

    class Borrowing(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self, box: Box) -> None:
            super().__init__()
            self.box = box
            self.dense = dense(keras, 8)

        def call(self, x: Any) -> Any:
            x = self.dense(x) * (1.0 + self.box.calls) + keras.random.normal([1], seed=self.box.seeds)
            self.box.mean.update_state(x)
            self.box.calls.assign(0.5 * self.box.calls + keras.ops.mean(x))
            return x + self.box.calls

    class Net(keras.Sequential):  # type: ignore[name-defined]
        @property
        def variables(self) -> list[Any]:
            return [*super().variables, box.calls, *box.mean.variables, box.seeds.state]

    box = Box()
    # Two blocks, so that the second call of the first one comes after the second one has changed the variables.
    return Net([keras.Input([8]), *(wrap(Borrowing(box)) for _ in range(2)), dense(keras, 1)]), data()


_BLOCKS = (dense_block, stateful_block, _activated_block, _nested_block, _losses_and_metrics, _without_training)
_MODELS = (_masks, _stateful_recurrent, _frozen, _partly_frozen, _thawed, _borrowing)
_SUBJECTS = {block.__name__.strip("_").removesuffix("_block"): _blocks(block) for block in _BLOCKS}
_SUBJECTS |= {make.__name__.strip("_"): make for make in _MODELS}
_IN_EAGER_CODE_TOO = (
    "losses_and_metrics",
    "stateful_recurrent",
    "masks",
    "nested",
    "without_training",
    "partly_frozen",
)


@pytest.mark.parametrize(
    ("subject", "way", "policy"),
    [
        *(("stateful", way, "float32") for way in WAYS),
        *((subject, way, "float32") for subject in _IN_EAGER_CODE_TOO for way in ("graph", "eager")),
        *((subject, "graph", "float32") for subject in ("dense", "activated", "frozen", "thawed")),
        *(("stateful", "graph", policy) for policy in ("mixed_float16", "mixed_bfloat16")),
        ("activated", "graph", "mixed_float16"),
        ("nested", "eager", "mixed_float16"),
        # A smaller block, because XLA takes long for each layer.
        ("dense", "xla", "mixed_float16"),
        *(("borrowing", way, "float32") for way in WAYS),
    ],
)
@for_every_keras()
def test_fit_ends_where_it_does_without_recomputation(keras: ModuleType, subject: str, way: str, policy: str) -> None:
    if subject == "borrowing" and not is_keras3(keras):
        pytest.skip("its variables are those of Keras 3")

    def trained(wrap: Wrap) -> tuple[list[Any], list[str], list[str]]:
        keras.utils.set_random_seed(0)
        net, batch = _SUBJECTS[subject](keras, wrap)
        opt = keras.optimizers.SGD(0.01)
        if policy != "float32":
            manager = tfmp.FixedLossScaleManager(128.0)
            opt = tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.01), manager, accumulation_steps=2)
        before = values(net)
        losses = fitted(net, opt, batch, **WAYS[way])
        found = [np.array(losses), *values(net), net.predict(batch[0], batch_size=8, verbose=0)]
        assert any(np.any(one != other) for one, other in zip(before, values(net), strict=True))
        return found, names(net.weights), names(net.trainable_variables)

    keras.mixed_precision.set_global_policy(policy)
    try:
        expected, got = trained(plain), trained(tfmp.Recompute)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert got[1:] == expected[1:]
    # XLA fuses the two computations of a block in different ways, and sums of several gradients are taken in another
    # order.
    is_exact = is_keras3(keras) and way != "xla" and subject not in {"losses_and_metrics", "masks"}
    assert_close(got[0], expected[0], 0 if is_exact else 1e-5 if policy == "float32" else 3e-3)


@for_every_keras()
def test_replicas_train_as_without_recomputation(keras: ModuleType, two_replicas: tf.distribute.Strategy) -> None:
    def trained(wrap: Wrap) -> list[np.ndarray]:
        with two_replicas.scope():
            net = model(keras, wrap, dense_block)
            opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.05))
        fitted(net, opt, jit_compile=False)
        return [variable.numpy() for variable in net.weights]

    # The order in which the replicas' gradients are summed differs from run to run.
    assert_close(trained(tfmp.Recompute), trained(plain), 1e-5)


@for_every_keras()
def test_recurrent_layer_is_reset_through_its_wrapper(keras: ModuleType) -> None:
    cell = keras.layers.SimpleRNN(2, stateful=True, kernel_initializer="ones", recurrent_initializer="ones")
    inputs = keras.Input(batch_shape=[1, 2, 4])
    wrapped = tfmp.Recompute(cell)
    net = keras.Model(inputs, wrapped(inputs))
    net(tf.ones([1, 2, 4]))
    assert wrapped.stateful
    assert np.any(np.asarray(cell.states[0]) != 0)
    wrapped.reset_state() if is_keras3(keras) else net.reset_states()
    assert not np.any(np.asarray(cell.states[0]))
