"""Recompute with Keras 3: the numbers of the layer without it, and the ways to call and to train."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

from keras_blocks import (
    activated_block,
    convolutional_block,
    data,
    dense_block,
    fitted,
    largest_difference,
    layers,
    model,
    nested_block,
    plain,
    stateful_block,
    values,
)

import tfmp

_WAYS: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True, "jit_compile": False},
}


pytestmark = pytest.mark.usefixtures("same_rounding")


@pytest.fixture(autouse=True)
def _policy_of_before() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("block", "way", "policy"),
    [
        *((stateful_block, way, "float32") for way in _WAYS),
        (stateful_block, "graph", "mixed_float16"),
        (stateful_block, "graph", "mixed_bfloat16"),
        (dense_block, "graph", "float32"),
        (activated_block, "graph", "mixed_float16"),
        (nested_block, "graph", "float32"),
        (nested_block, "eager", "mixed_float16"),
        (convolutional_block, "graph", "float32"),
    ],
)
def test_fit_ends_at_the_variables_of_the_plain_model(block: Any, way: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    expected, got = (fitted(model(wrap, block), **_WAYS[way]) for wrap in (plain, tfmp.Recompute))
    # XLA fuses the two computations of a block in different ways.
    assert largest_difference(expected, got) <= (1e-6 if way == "xla" else 0)


def test_variables_have_the_paths_of_the_plain_model() -> None:
    paths = [
        [
            variable.path
            for variable in model(wrap, lambda name: keras.Sequential([layers.Dense(8, name="d")], name=name)).weights
        ]
        for wrap in (plain, tfmp.Recompute)
    ]
    assert paths[0] == paths[1]


def test_state_of_a_block_advances_once_a_step() -> None:
    trained = model(tfmp.Recompute)
    seeds = [np.asarray(value) for value in _seeds(trained)]
    trained.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    trained.train_on_batch(*[each[:8] for each in data()])
    reference = model(plain)
    reference.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    reference.train_on_batch(*[each[:8] for each in data()])
    assert [value.tolist() for value in _seeds(trained)] == [value.tolist() for value in _seeds(reference)]
    assert [value.tolist() for value in seeds] != [value.tolist() for value in _seeds(trained)]


def _seeds(trained: keras.Model) -> list[np.ndarray]:
    return [np.asarray(variable) for variable in trained.non_trainable_variables if "seed" in variable.path]


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_added_losses_and_metrics_count_once(way: str) -> None:
    class Counting(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="counting")
            self.dense = layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")
            self.mean = keras.metrics.Mean(name="mean_activation")
            self.calls = keras.metrics.Sum(name="calls")

        def call(self, x: Any) -> Any:
            self.mean.update_state(keras.ops.mean(x))
            self.calls.update_state(1.0)
            self.add_loss(keras.ops.mean(x**2))
            return self.dense(x)

    def trained(wrap: Any) -> tuple[dict[str, list[float]], list[np.ndarray]]:
        keras.utils.set_random_seed(0)
        inputs = keras.Input([8])
        hidden = layers.Dense(3, name="before")(inputs)
        net = keras.Model(inputs, layers.Dense(1)(wrap(Counting())(hidden)))
        net.compile(keras.optimizers.SGD(0.1), "mse", **_WAYS[way])
        history = net.fit(*data(), epochs=2, batch_size=8, shuffle=False, verbose=0)
        return history.history, values(net)

    (expected, expected_values), (got, got_values) = trained(plain), trained(tfmp.Recompute)
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-6)
    # The layer before the block is trained by the added losses too.
    for one, other in zip(expected_values, got_values, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)


def test_masks_pass_through_a_block() -> None:
    def trained(wrap: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        block = layers.GRU(4, return_sequences=True, dropout=0.2, seed=2)
        inputs = keras.Input([5], dtype="int32")
        embedded = layers.Embedding(6, 4, mask_zero=True)(inputs)
        net = keras.Model(inputs, layers.Dense(1)(layers.LSTM(3)(wrap(block)(embedded))))
        net.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
        ids = np.random.default_rng(1).integers(0, 6, [8, 5]) * (np.arange(5) < 3)
        net.fit(ids, np.ones([8, 1]), epochs=2, batch_size=4, shuffle=False, verbose=0)
        return values(net)

    for expected, got in zip(trained(plain), trained(tfmp.Recompute), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


class _WithoutTraining(layers.Layer):
    """Has a sublayer that takes `training` from the context, and is built by its first call."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.dense = layers.Dense(8, "tanh")
        self.drop = layers.Dropout(0.5, seed=1)

    def call(self, x: Any) -> Any:
        return self.drop(self.dense(x))


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_training_reaches_the_second_call_of_a_layer_that_does_not_take_it(way: str) -> None:
    expected, got = (fitted(model(wrap, _WithoutTraining), **_WAYS[way]) for wrap in (plain, tfmp.Recompute))
    assert largest_difference(expected, got) <= 1e-6


def test_frozen_block_passes_gradients_through() -> None:
    def trained(wrap: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        block = stateful_block()
        wrapped = wrap(block)
        inputs = keras.Input([8])
        net = keras.Model(inputs, layers.Dense(1)(wrapped(layers.Dense(8)(inputs))))
        wrapped.trainable = False
        return fitted(net, jit_compile=False)

    expected, got = trained(plain), trained(tfmp.Recompute)
    assert len(got.trainable_variables) == len(expected.trainable_variables) == 4
    assert largest_difference(expected, got) <= 1e-6


def test_replicas_train_as_without_recomputation() -> None:
    def trained(wrap: Any) -> keras.Model:
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            return fitted(
                model(wrap, dense_block), tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.05)), jit_compile=False
            )

    # The order in which the replicas' gradients are summed differs from run to run.
    assert largest_difference(trained(plain), trained(tfmp.Recompute)) <= 1e-5


@pytest.mark.parametrize(
    ("block", "way", "policy"),
    [
        (stateful_block, "graph", "mixed_bfloat16"),
        # A smaller block, because XLA takes long for each layer.
        (dense_block, "xla", "mixed_float16"),
    ],
)
def test_composes_with_loss_scaling_accumulation_and_precision(block: Any, way: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)

    def trained(wrap: Any) -> keras.Model:
        return fitted(
            model(wrap, block),
            tfmp.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), tfmp.FixedLossScaleManager(128.0), accumulation_steps=2
            ),
            **_WAYS[way],
        )

    assert largest_difference(trained(plain), trained(tfmp.Recompute)) <= (1e-3 if way == "xla" else 0)


@pytest.mark.parametrize("steps", [1, 2])
def test_composes_with_grad_scaler(steps: int) -> None:
    def trained(wrap: Any) -> keras.Model:
        net, scaler, opt = model(wrap), tfmp.GradScaler(64.0), keras.optimizers.SGD(0.05)
        opt.build(net.trainable_variables)
        weights = [variable.value for variable in net.trainable_variables]
        accumulator = tfmp.GradientAccumulator(weights, steps)

        @tf.function
        def micro_batch(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = scaler.scale(tf.reduce_mean((net(x, training=True) - y) ** 2))
            accumulator.add(tape.gradient(loss, weights), scaler.loss_scale)

        @tf.function
        def step() -> None:
            grads = scaler.unscale(opt, accumulator)
            scaler.step(opt, zip(grads, net.trainable_variables, strict=True))
            scaler.update()

        for _ in range(2):
            for each in np.array_split(np.arange(24), 2 * steps):
                micro_batch(data()[0][each], data()[1][each])
                if accumulator.is_full:
                    step()
        return net

    assert largest_difference(trained(plain), trained(tfmp.Recompute)) <= 1e-6


def _partly_frozen(wrap: Any, way: str) -> keras.Model:
    """Return a model that trained a layer of a frozen block; with `nested`, in two blocks that are both wrapped."""
    keras.utils.set_random_seed(0)
    inner = stateful_block("inner")
    block = keras.Sequential([wrap(inner), layers.Dense(8, name="wide")], name="outer") if way == "nested" else inner
    net = keras.Sequential([keras.Input([8]), wrap(block), layers.Dense(1, name="head")], name="net")
    if way == "later":
        fitted(net, jit_compile=False)
    block.trainable = False
    inner.layers[-1].trainable = True
    return fitted(net, **_WAYS["eager" if way == "eager" else "graph"])


@pytest.mark.parametrize("way", ["graph", "eager", "nested", "later"])
def test_trainable_weights_of_a_frozen_block_are_trained(way: str) -> None:
    expected, got = (_partly_frozen(wrap, way) for wrap in (plain, tfmp.Recompute))
    assert [each.path for each in got.trainable_variables] == [each.path for each in expected.trainable_variables]
    assert len(got.trainable_variables) == 4
    assert largest_difference(expected, got) <= 1e-6


class _Box:
    """Hides variables from Keras, which looks for them in attributes, lists and dictionaries only."""

    def __init__(self) -> None:
        self.calls = keras.Variable(0.0, trainable=False, name="calls")
        self.mean = keras.metrics.Mean()
        self.seeds = keras.random.SeedGenerator(1)


class _Borrowing(layers.Layer):
    """Changes variables that are not its own, and computes with them before and after."""

    def __init__(self, box: _Box) -> None:
        super().__init__()
        self.box = box
        self.dense = layers.Dense(8)

    def call(self, x: Any) -> Any:
        x = self.dense(x) * (1.0 + self.box.calls) + keras.random.normal([1], seed=self.box.seeds)
        self.box.mean.update_state(x)
        self.box.calls.assign(0.5 * self.box.calls + keras.ops.mean(x))
        return x + self.box.calls


@pytest.mark.parametrize("way", _WAYS)
def test_variables_that_a_block_borrows_are_carried_over(way: str) -> None:
    def trained(wrap: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        box = _Box()
        # Two blocks, so that the second call of the first one comes after the second one has changed the variables.
        net = keras.Sequential([keras.Input([8]), *(wrap(_Borrowing(box)) for _ in range(2)), layers.Dense(1)])
        net.compile(keras.optimizers.SGD(0.01), "mse", **_WAYS[way])
        net.fit(*data(), batch_size=12, shuffle=False, verbose=0)
        net.predict(data()[0], batch_size=12, verbose=0)
        borrowed = [box.calls, *box.mean.variables, box.seeds.state]
        return [*values(net), *(np.asarray(each) for each in borrowed)]

    for expected, got in zip(trained(plain), trained(tfmp.Recompute), strict=True):
        assert np.any(expected != 0)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", _WAYS)
def test_stateful_recurrent_layer_goes_on_with_its_states(way: str) -> None:
    def outputs(wrap: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        cell = layers.SimpleRNN(4, stateful=True)
        wrapped = wrap(cell)
        inputs = keras.Input([2, 8], batch_size=8)
        net = keras.Model(inputs, layers.Dense(1)(wrapped(inputs)))
        net.compile(keras.optimizers.SGD(0.01), "mse", **_WAYS[way])
        x = np.stack([data()[0]] * 2, 1)
        net.fit(x, data()[1], batch_size=8, shuffle=False, verbose=0)
        found = [net.predict(x, batch_size=8, verbose=0), np.asarray(cell.states[0])]
        assert wrapped.stateful
        wrapped.reset_state()
        return [*found, np.asarray(cell.states[0])]

    expected, got = outputs(plain), outputs(tfmp.Recompute)
    assert np.any(got[1] != 0)
    assert not np.any(got[2])
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_layer_that_hands_on_a_mask_can_be_wrapped_in_a_functional_model() -> None:
    class Masked(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_masking = True

        def call(self, x: Any, mask: Any = None) -> Any:
            return x * keras.ops.cast(mask, x.dtype)[..., None]

    def results(wrap: Any) -> np.ndarray:
        keras.utils.set_random_seed(0)
        inputs = keras.Input([3], dtype="int32")
        x = wrap(Masked())(layers.Embedding(4, 2, mask_zero=True)(inputs))
        return keras.Model(inputs, layers.SimpleRNN(2)(x)).predict(np.array([[1, 2, 0]]), verbose=0)

    np.testing.assert_array_equal(results(tfmp.Recompute), results(plain))
