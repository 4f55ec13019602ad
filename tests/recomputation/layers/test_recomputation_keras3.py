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


class _ManyArguments(layers.Layer):
    """Takes and returns nests, integers, booleans, None, and options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(5, 4)
        self.dense = layers.Dense(4)
        self.drop = layers.Dropout(0.5, seed=1)

    def call(
        self,
        pair: Any,
        ids: Any = None,
        *,
        scale: float = 1.0,
        keep: Any = None,
        nothing: Any = None,
        training: bool | None = None,
    ) -> dict[str, Any]:
        assert nothing is None
        first, second = pair["first"], pair["second"]
        total = self.drop(self.dense(first), training=training) * scale + second
        if keep is not None:
            total = total * keras.ops.cast(keep, total.dtype)[:, None]
        if ids is not None:
            total = total + self.embedding(ids)
        return {"total": total, "ids": ids, "parts": [first, None]}


@pytest.mark.parametrize("in_function", [False, True, "xla"])
def test_nests_integers_booleans_and_options_pass_through(in_function: Any) -> None:
    first, second = (tf.random.stateless_normal([3, 4], [seed, 0]) for seed in (1, 2))
    ids, keep = tf.constant([1, 1, 4]), tf.constant([True, True, False])

    def grads_of(wrap: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        layer = _ManyArguments(name="many")
        called = wrap(layer)
        called({"first": first, "second": second}, ids, scale=0.5, keep=keep)

        def compute() -> Any:
            with tf.GradientTape() as tape:
                tape.watch([first, second])
                results = called({"first": first, "second": second}, ids, scale=0.5, keep=keep, training=True)
                loss = tf.reduce_sum(results["total"] ** 2) + tf.reduce_sum(results["parts"][0])
            assert results["parts"][1] is None
            weights = [variable.value for variable in layer.trainable_variables]
            grads = tape.gradient(loss, [first, second, *weights])
            return results["total"], results["ids"], [tf.convert_to_tensor(grad) for grad in grads]

        if in_function:
            compute = tf.function(compute, jit_compile=in_function == "xla")
        total, got_ids, grads = compute()
        assert got_ids.numpy().tolist() == ids.numpy().tolist()
        return [total.numpy(), *(grad.numpy() for grad in grads)]

    for expected, got in zip(grads_of(plain), grads_of(tfmp.Recompute), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_embedding_gets_a_sparse_gradient() -> None:
    block = tfmp.Recompute(layers.Embedding(10, 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(block(tf.constant([3, 3, 7])))
    grad = tape.gradient(loss, block.layer.embeddings.value)
    assert isinstance(grad, tf.IndexedSlices)
    assert tf.convert_to_tensor(grad).numpy()[:, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 1, 0, 0]


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
        return fitted(net)

    expected, got = trained(plain), trained(tfmp.Recompute)
    assert len(got.trainable_variables) == len(expected.trainable_variables) == 4
    assert largest_difference(expected, got) <= 1e-6


def test_without_a_tape_the_layer_is_called_once_and_directly() -> None:
    calls = []

    class Noting(layers.Layer):
        def call(self, x: Any) -> Any:
            calls.append(keras.src.backend.in_stateless_scope())
            return x * 2.0

    block = tfmp.Recompute(Noting())
    block(tf.ones([1]))
    calls.clear()
    block(tf.ones([1]))
    assert calls == [False]


def test_first_computation_is_no_input_of_the_gradients() -> None:
    """The gradient ops of a graph read the inputs of a block, and none of the activations of its first call."""
    block = tfmp.Recompute(keras.Sequential([layers.Dense(4, "gelu"), layers.Dense(4, "gelu")]))
    block(tf.ones([2, 4]))

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x)
        first_call.update(op.name for op in tf.compat.v1.get_default_graph().get_operations())
        return tape.gradient(y, x, tf.ones_like(y))

    first_call: set[str] = set()
    graph = gradient.get_concrete_function(tf.TensorSpec([2, 4])).graph
    backward = [op for op in graph.get_operations() if op.name not in first_call]
    read = {tensor.op for op in backward for tensor in op.inputs if tensor.op.name in first_call}
    assert {op.type for op in read} <= {"Placeholder", "ReadVariableOp", "Const", "IdentityN", "Identity", "Shape"}
    # The second computation waits for the gradients of the block's outputs.
    assert any(op.control_inputs for op in backward if op.type == "Identity")


def test_second_derivatives_are_those_of_the_layer() -> None:
    def second(wrap: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        block = wrap(keras.Sequential([keras.Input([3]), layers.Dense(4, "tanh"), layers.Dense(1)]))
        x = tf.constant([[0.1, 0.2, 0.3]])
        weights = [variable.value for variable in block.trainable_variables]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = block(x)
            penalty = tf.reduce_sum(tape.gradient(y, x) ** 2)
        return [np.asarray(grad) for grad in outer.gradient(penalty, [x, *weights[:-1]])]

    for expected, got in zip(second(plain), second(tfmp.Recompute), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


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
        (activated_block, "xla", "mixed_float16"),
    ],
)
def test_composes_with_loss_scaling_accumulation_and_precision(block: Any, way: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)

    def trained(wrap: Any) -> keras.Model:
        return fitted(
            model(wrap, block),
            tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.01), 128.0, accumulation_steps=2),
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


class _Noise(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


class _Counter(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = tf.Variable(0.0, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_layer_that_assigns_to_a_trained_weight_is_refused(way: str) -> None:
    block = layers.SpectralNormalization(layers.Dense(8, name="dense"), name="spectral")
    net = keras.Sequential([keras.Input([8]), tfmp.Recompute(block), layers.Dense(1)])
    with pytest.raises(ValueError, match=r"the layer 'spectral' cannot be recomputed: its call assigns .*dense/kernel"):
        fitted(net, **_WAYS[way])
    # Without gradients it may do so.
    net.predict(data()[0], verbose=0)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_Noise, r"the layer 'block' cannot be recomputed: its op .*draws other random numbers the second time"),
        (_Counter, r"the layer 'block' cannot be recomputed: its op .*changes a variable, which would happen twice"),
    ],
)
def test_state_that_is_not_in_a_variable_of_keras_is_refused(layer: Any, message: str, in_function: bool) -> None:
    block = tfmp.Recompute(layer(name="block"))

    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x)
        return tape.gradient(y, x)

    with pytest.raises(ValueError, match=message):
        (tf.function(gradient) if in_function else gradient)(tf.ones([2]))
