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
@pytest.mark.essential(
    "stateful_block-xla-float32",
    "stateful_block-eager-float32",
    "activated_block-graph-mixed_float16",
    "nested_block-graph-float32",
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
@pytest.mark.essential
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
@pytest.mark.essential
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


def test_numbers_drawn_without_a_seed_differ_from_step_to_step() -> None:
    block = tfmp.Recompute(layers.Lambda(lambda x: x + keras.random.normal([1])))

    def noise() -> float:
        with tf.GradientTape():
            return float(block(tf.zeros([1]))[0])

    assert noise() != noise()


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


class _Raw(layers.Layer):
    """Computes by ops of TensorFlow, which do not cast."""

    def build(self, *_: Any) -> None:
        self.kernel = self.add_weight(name="kernel", shape=(8, 3))

    def call(self, pair: Any, scale: Any = None, *, mask: Any = None, negative: bool = False) -> Any:
        product = tf.matmul(pair["x"], tf.convert_to_tensor(self.kernel))
        if scale is not None:
            product = product * scale
        return {"parts": [-product if negative else product, tf.cast(pair["y"], "float32")], "ids": tf.argmax(product)}


def test_symbolic_results_have_the_types_and_shapes_of_the_layer() -> None:
    keras.config.set_dtype_policy("mixed_float16")

    def described(wrap: Any) -> list[Any]:
        x, y, scale = keras.Input([8]), keras.Input([1], dtype="float64"), keras.Input([3])
        results = wrap(_Raw())({"x": x, "y": y}, scale, negative=True)
        called = keras.Model([x, y, scale], results)([tf.ones([2, 8]), tf.ones([2, 1]), tf.ones([2, 3])])
        return [
            keras.tree.map_structure(lambda each: (keras.backend.standardize_dtype(each.dtype), each.shape[1:]), nest)
            for nest in (results, called)
        ]

    (expected, expected_call), (got, got_call) = described(plain), described(tfmp.Recompute)
    assert expected["parts"][0] == ("float16", (3,))
    assert got == expected
    assert got_call == expected_call


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
