"""Scopes around and within what frameworks compute: Keras, TensorFlow 1, strategies, and the tools of tfmp."""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Way, assert_as_plain, assert_no_scope_is_open, each_way, matrix, types
from kerases import for_every_keras

import tfmp

_PLAIN = contextlib.nullcontext()


def _dense(keras: ModuleType, units: int, activation: str | None = None, **settings: Any) -> Any:
    # Random initializers of Keras 2.15 warn.
    return keras.layers.Dense(units, activation, **{"kernel_initializer": "ones"} | settings)


def _recurrent(keras: ModuleType, name: str, **settings: Any) -> Any:
    ones = {"kernel_initializer": "ones", "recurrent_initializer": "zeros"}
    return getattr(keras.layers, name)(2, **ones, **settings)


def _one_after_another(layers: list[Any], x: tf.Tensor) -> Any:
    for layer in layers:
        x = layer(x, training=True) if "batch_normalization" in layer.name else layer(x)
    return x


class _Net(NamedTuple):
    """Layers, what they are called on, which they get after a product, and the type of the scope."""

    layers: Callable[[ModuleType], list[Any]]
    x: np.ndarray
    call: Callable[[list[Any], tf.Tensor], Any] = _one_after_another
    dtype: str = "float16"


_SEQUENCES = np.random.default_rng(0).normal(size=[2, 3, 2]).astype(np.float32)
_IMAGES = np.random.default_rng(0).normal(size=[2, 5, 5, 1]).astype(np.float32)
_IDS = np.array([[1, 2, 3, 0], [1, 0, 0, 0]])
_MASK = np.array([[[True, False, False]] * 3, [[True, True, False]] * 3])


def _with_policy(policy: str, keras: ModuleType) -> list[Any]:
    layers = [_dense(keras, 3, "relu", dtype=policy), keras.layers.LayerNormalization(dtype=policy)]
    return [*layers, _dense(keras, 2, dtype="float32"), _dense(keras, 1, dtype=policy)]


def _of_images(keras: ModuleType) -> list[Any]:
    layers = keras.layers
    convolution = layers.Conv2D(2, 2, kernel_initializer="ones", use_bias=False)
    normalization = layers.BatchNormalization(momentum=0.5)
    return [convolution, normalization, layers.ReLU(), layers.MaxPooling2D(2), layers.Flatten(), _dense(keras, 3)]


def _of_a_model(keras: ModuleType) -> list[Any]:
    class Block(keras.layers.Layer):  # type: ignore[name-defined] # of any Keras
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = _dense(keras, 3), keras.layers.LayerNormalization()

        def call(self, x: Any) -> Any:
            return self.norm(self.inner(x) @ tf.constant([[1.0, 2.0], [0.5, 1.0], [1.0, 0.0]]))

    return [keras.Sequential([_dense(keras, 3, "relu"), _dense(keras, 2), Block()])]


_NETS: dict[str, _Net] = {
    **{
        name: _Net(lambda keras, make=make: [make(keras)], _SEQUENCES)  # type: ignore[misc] # the default argument
        for name, make in {
            "Dense": lambda keras: _dense(keras, 2),
            "LSTM": lambda keras: _recurrent(keras, "LSTM", return_sequences=True),
            "LSTM unrolled": lambda keras: _recurrent(keras, "LSTM", unroll=True),
            "GRU": lambda keras: _recurrent(keras, "GRU", return_sequences=True),
            "SimpleRNN": lambda keras: _recurrent(keras, "SimpleRNN", return_sequences=True),
            "RNN": lambda keras: keras.layers.RNN(_recurrent(keras, "LSTMCell")),
            "Conv1D": lambda keras: keras.layers.Conv1D(2, 2, kernel_initializer="ones"),
            "BatchNormalization": lambda keras: keras.layers.BatchNormalization(),
            "LayerNormalization": lambda keras: keras.layers.LayerNormalization(),
            "TimeDistributed": lambda keras: keras.layers.TimeDistributed(_dense(keras, 2)),
            "EinsumDense": lambda keras: keras.layers.EinsumDense("abc,cd->abd", [None, 2], kernel_initializer="ones"),
            "PReLU": lambda keras: keras.layers.PReLU(),
            "pool": lambda keras: keras.layers.GlobalAveragePooling1D(),
            "softmax": lambda keras: keras.layers.Softmax(),
        }.items()
    },
    **{
        f"{policy} in {dtype}": _Net(functools.partial(_with_policy, policy), _SEQUENCES, dtype=dtype)
        for policy, dtype in [
            ("float32", "float16"),
            ("mixed_float16", "float16"),
            ("mixed_bfloat16", "float16"),
            ("mixed_float16", "bfloat16"),
        ]
    },
    "masked": _Net(
        lambda keras: [
            keras.layers.Embedding(4, 2, mask_zero=True, embeddings_initializer="ones"),
            _recurrent(keras, "LSTM"),
        ],
        _IDS,
    ),
    "attention with a mask": _Net(
        lambda keras: [keras.layers.MultiHeadAttention(2, 4, kernel_initializer="ones")],
        _SEQUENCES,
        lambda layers, x: layers[0](x, x, attention_mask=tf.constant(_MASK)),
    ),
    "images": _Net(_of_images, _IMAGES),
    "model that is not built": _Net(_of_a_model, _SEQUENCES),
}


# What is the same in tf_keras as in Keras 2.15 is not run twice where both Keras 3 and tf_keras are.
@for_every_keras("keras3", "keras2")
@each_way
@pytest.mark.parametrize("name", _NETS)
def test_layers_between_products_compute_and_train_as_in_none(keras: ModuleType, way: Way, name: str) -> None:
    net = _NETS[name]

    def step(layers: list[Any], scope: Any, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, scope:
            before = tf.tensordot(x, tf.eye(x.shape[-1]), 1) if x.dtype.is_floating else x
            between = net.call(layers, before)
            after = tf.tensordot(between, tf.eye(between.shape[-1], dtype=between.dtype), 1)
            loss = tf.reduce_sum(tf.cast(after, tf.float32) ** 2)
        grads = tape.gradient(loss, [each for layer in layers for each in layer.trainable_weights])
        return [after, loss, *map(tf.convert_to_tensor, grads)]

    plain, layers = net.layers(keras), net.layers(keras)
    expected = step(plain, _PLAIN, tf.constant(net.x))
    found = way(functools.partial(step, layers, tfmp.autocast(net.dtype)))(tf.constant(net.x))
    # Where layers normalize, small gradients are differences of large numbers.
    near = 0.12 if "bfloat16" in name or "mask" in name or name in ("images", "model that is not built") else 3e-2
    assert types(found) == [net.dtype, *["float32"] * (len(found) - 1)]
    for one, other in zip(found, expected, strict=True):
        largest = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=near, atol=near * largest)
    weights, known = ([np.asarray(each) for layer in made for each in layer.weights] for made in (layers, plain))
    assert_as_plain([each for each in weights if each.dtype != np.int64], known, ["float32"] * len(known), near)


@for_every_keras()
@pytest.mark.parametrize("how", ["eager", "function", "two replicas"])
def test_scope_in_the_calls_of_a_model_and_a_layer_trains(
    keras: ModuleType, how: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    found = []

    class Layer(keras.layers.Layer):  # type: ignore[name-defined] # of any Keras
        @tfmp.autocast()
        def call(self, x: Any) -> Any:
            # Keras looks whether it takes `training`, which this one does not.
            return tf.cast(x @ tf.eye(3), tf.float32)

    class Model(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.inner, self.head = _dense(keras, 3, "relu"), Layer(), _dense(keras, 1)

        @tfmp.autocast()
        def call(self, x: Any, training: bool = False) -> Any:
            y = self.hidden(x)
            found.append((y @ tf.ones([3, 3])).dtype.name)
            return tf.cast(self.head(self.inner(y)), tf.float32)

    with two_replicas.scope() if how == "two replicas" else _PLAIN:
        model = Model()
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=how == "eager", jit_compile=False)
    x = np.random.default_rng(0).normal(size=[8, 2]).astype(np.float32)
    losses = model.fit(x, x[:, :1] + 1, batch_size=4, epochs=3, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0]
    assert set(found) == {"float16"}
    assert types(model.weights) == ["float32"] * 4
    assert model.predict(x, verbose=0).dtype == np.float32
    assert np.isfinite(model.evaluate(x, x[:, :1], verbose=0))


@for_every_keras("keras3", "keras2")
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_scope_in_a_train_step(keras: ModuleType, jit_compile: bool) -> None:
    class Model(keras.Sequential):  # type: ignore[name-defined] # of any Keras
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                with tfmp.autocast():
                    loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
                scaled = self.optimizer.scale_loss(loss)
            grads = tape.gradient(scaled, self.trainable_variables)
            ops = tf.compat.v1.get_default_graph().get_operations()
            products.update(op.get_attr("T").name for op in ops if op.type == "MatMul")
            found.extend(types(grads))
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"half_loss": loss}

    found: list[str] = []
    products: set[str] = set()
    model = Model([keras.Input([2]), _dense(keras, 3, "relu"), _dense(keras, 1)])
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.01), tfmp.FixedLossScaleManager(1024.0))
    model.compile(opt, jit_compile=jit_compile)
    x = np.random.default_rng(0).normal(size=[8, 2]).astype(np.float32)
    losses = model.fit(x, x[:, :1] + 1, batch_size=4, epochs=3, verbose=0, shuffle=False).history["half_loss"]
    assert losses[-1] < losses[0]
    assert (products, set(found), int(model.optimizer.applied_steps)) == ({"float16"}, {"float32"}, 6)


@for_every_keras()
def test_model_is_made_within_a_scope_and_fit_is_refused_there_and_works_after_it(keras: ModuleType) -> None:
    with tfmp.autocast():
        inputs = keras.Input([2])
        hidden = keras.layers.Activation("relu")(_dense(keras, 3)(inputs))
        model = keras.Model(inputs, _dense(keras, 1)(keras.layers.concatenate([hidden, inputs])))
    assert types([model(matrix()), *model.weights]) == ["float32"] * 5
    opt = keras.optimizers.SGD(0.01)
    # TensorFlow takes no new variables from a function whose first trace failed, for whatever reason.
    opt.build(model.trainable_variables)
    model.compile(opt, "mse")
    data = (np.ones([4, 2], np.float32), np.ones([4, 1], np.float32))
    with tfmp.autocast(), pytest.raises(RuntimeError, match=r"tfmp\.autocast"):
        model.fit(*data, verbose=0)
    assert_no_scope_is_open()
    model.fit(*data, verbose=0)
    before = np.asarray(model.weights[0]).tolist()
    with tfmp.autocast():
        model.fit(*data, verbose=0)
        assert (model(matrix()) @ tf.ones([1, 1])).dtype == tf.float16
    assert np.asarray(model.weights[0]).tolist() != before


@for_every_keras("keras3", "keras2")
@each_way
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_optimizer_is_applied_within_the_scope(keras: ModuleType, way: Way, name: str) -> None:
    def trained(within: Any) -> Any:
        w = tf.Variable([[0.5], [0.25]])
        opt = getattr(keras.optimizers, name)(0.125)
        opt.build([w])

        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape, tfmp.autocast():
                loss = tf.reduce_mean(tf.square(x @ w))
            grads = tape.gradient(loss, [w])
            with within:
                opt.apply_gradients(zip(grads, [w], strict=True))

        call = way(step)
        for _ in range(3):
            call(matrix())
        return w

    assert_as_plain(trained(tfmp.autocast()), trained(_PLAIN), ["float32"], 1e-6)


@each_way
def test_replicas_enter_the_scope_inside(two_replicas: tf.distribute.MirroredStrategy, way: Way) -> None:
    with two_replicas.scope():
        w = tf.Variable(tf.ones([2, 2]))
        b = tf.Variable(tf.zeros([2]), synchronization=tf.VariableSynchronization.ON_READ, trainable=False)
    found = []

    def replica_step(x: tf.Tensor) -> tf.Tensor:
        offset = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        with tf.GradientTape() as tape, tfmp.autocast():
            y = x @ w + b
            loss = tf.reduce_mean(y) + offset
        grad = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, w))
        found.append(tuple(types([y, loss, grad])))
        w.assign(w - 0.25 * grad)
        return loss

    step = way(lambda x: two_replicas.reduce("sum", two_replicas.run(replica_step, (x,)), None))
    assert float(step(matrix())) == 5 * 2 + 1
    assert set(found) == {("float16", "float32", "float32")}
    # The mean's gradient by w is [[1, 1], [1.5, 1.5]], on each of two replicas.
    assert w.numpy().tolist() == [[0.5, 0.5], [0.25, 0.25]]
    assert_no_scope_is_open()


@each_way
@pytest.mark.parametrize("num_devices", [1, 2])
def test_scope_around_replicas_is_refused(
    num_devices: int, two_replicas: tf.distribute.MirroredStrategy, way: Way
) -> None:
    strategy = two_replicas if num_devices == 2 else tf.distribute.OneDeviceStrategy("cpu:0")

    def step(around: Any, inside: Any = _PLAIN) -> Any:
        def replica_step() -> tf.Tensor:
            with inside:
                return matrix() @ matrix()

        with around:
            return strategy.run(replica_step)

    message = "strategy.run is called within tfmp.autocast.* Enter the scope inside of the function"
    with pytest.raises(RuntimeError, match=message):
        way(functools.partial(step, tfmp.autocast()))()
    with pytest.raises(RuntimeError, match=message), tfmp.autocast(), strategy.scope():
        step(_PLAIN)
    found = [way(functools.partial(step, tfmp.autocast(enabled=False), each))() for each in (_PLAIN, tfmp.autocast())]
    assert types([strategy.experimental_local_results(each)[0] for each in found]) == ["float32", "float16"]


@each_way
def test_default_strategy_runs_within_a_scope(way: Way) -> None:
    @tfmp.autocast()
    def step() -> tf.Tensor:
        return tf.distribute.get_strategy().run(lambda: matrix() @ matrix())

    assert way(step)().dtype == tf.float16


@pytest.mark.graph
@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize("name", ["GradientDescentOptimizer", "AdamOptimizer", "MomentumOptimizer"])
def test_graph_trains_with_minimize_inside_and_outside(name: str, use_resource: bool, within: bool) -> None:
    v1 = tf.compat.v1
    if not use_resource and v1.control_flow_v2_enabled():
        pytest.skip("control flow v2 updates no reference variable")

    def trained(scope: Any, around_step: Any) -> tuple[list[str], Any]:
        with tf.Graph().as_default(), v1.Session() as session:
            w = v1.get_variable("w", initializer=np.full([2, 2], 0.5, np.float32), use_resource=use_resource)
            b = v1.get_variable("b", [2], initializer=v1.zeros_initializer(), use_resource=use_resource)
            x = v1.placeholder(tf.float32, [None, 2])
            inner = getattr(v1.train, name)(*([0.125, 0.5] if name == "MomentumOptimizer" else [0.125]))
            opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(64.0))
            with scope:
                y = tf.matmul(x, w) + b
                hidden = tf.nn.bias_add(tf.matmul(y, w), b)
                loss = tf.reduce_mean(tf.square(hidden / 2.0))
            with around_step:
                grads_and_vars = opt.compute_gradients(loss, [w, b])
                step = opt.apply_gradients(grads_and_vars)
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(step, {x: [[1, 2], [0.5, 0.25]]})
            assert int(session.run(opt.applied_steps)) == 3
            return types([y, hidden, loss, *(grad for grad, _ in grads_and_vars)]), session.run([w, b])

    found, expected = trained(tfmp.autocast(), tfmp.autocast() if within else _PLAIN), trained(_PLAIN, _PLAIN)
    assert found[0] == ["float16", "float16", "float32", "float32", "float32"]
    assert_as_plain(found[1], expected[1], ["float32", "float32"], 5e-3)


def test_variables_of_a_graph_do_not_widen_an_activation(session: tf.compat.v1.Session) -> None:
    v1 = tf.compat.v1
    ones = v1.ones_initializer()
    reference = v1.get_variable("reference", [2], initializer=ones, use_resource=False)
    resource = v1.get_variable("resource", [2], initializer=ones, use_resource=True)
    partitioned = v1.get_variable("parts", [2], initializer=ones, partitioner=v1.fixed_size_partitioner(1))
    with tfmp.autocast():
        y = matrix() @ matrix()
        results = [y + reference, y + reference.read_value(), y + reference.value(), y + tf.identity(reference)]
        results += [resource + y, y + resource.read_value(), y + tf.convert_to_tensor(partitioned), reference + y]
    session.run(v1.global_variables_initializer())
    assert types(results) == ["float16"] * 8
    assert [each.tolist() for each in session.run(results)] == [[[8, 11], [16, 23]]] * 8


@each_way
@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
def test_grad_scaler_trains_with_autocast_and_sees_an_overflow(way: Way, within: bool) -> None:
    w, scaler = tf.Variable([[1.0], [1.0]]), tfmp.GradScaler(init_scale=2.0**10)
    opt = tf.compat.v1.train.GradientDescentOptimizer(0.125)

    def step(x: tf.Tensor) -> None:
        with tfmp.autocast() if within else _PLAIN:
            with tf.GradientTape() as tape:
                with tfmp.autocast():
                    loss = tf.reduce_mean(x @ w)
                scaled = scaler.scale(loss)
            grads = scaler.unscale(opt, tape.gradient(scaled, [w]))
            scaler.step(opt, zip(grads, [w], strict=True))
            scaler.update()

    call = way(step)
    call(matrix())
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
    # Beyond the largest number of float16, and not of float32.
    call(matrix() * 2.0**16)
    assert (w.numpy().tolist(), float(scaler.get_scale())) == ([[1 - 0.25], [1 - 0.375]], 2.0**9)


@each_way
def test_gradients_are_accumulated_in_a_loop_with_autocast(way: Way) -> None:
    w = tf.Variable([[1.0], [1.0]])
    accumulator = tfmp.GradientAccumulator([w], 2)

    def micro_batch(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            with tfmp.autocast():
                loss = tf.reduce_mean(x @ w)
            scaled = loss * 1024.0
        with tfmp.autocast():
            accumulator.add(tape.gradient(scaled, [w]), loss_scale=1024.0)

    call = way(micro_batch)
    call(matrix())
    call(matrix() * 3.0)
    assert bool(accumulator.is_full)
    assert accumulator.mean()[0].numpy().tolist() == [[4], [6]]


@each_way
def test_probes_and_ranges_in_a_scope(way: Way) -> None:
    @tfmp.autocast()
    def forward(x: tf.Tensor) -> tf.Tensor:
        return tfmp.ranges.probe(x @ x, "product") + 1.0

    assert way(forward)(matrix()).dtype == tf.float16


def test_wrapped_optimizer_minimizes_a_function_with_a_scope() -> None:
    w = tf.Variable([[1.0], [1.0]])
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.125), 1024.0)
    opt.minimize(tfmp.autocast()(lambda: tf.reduce_mean(matrix() @ w)), var_list=[w])
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
