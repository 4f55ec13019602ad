"""Scopes around and within what frameworks compute: Keras, TensorFlow 1, strategies, and the tools of tfmp."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras

import tfmp
from tfmp.mixed_precision.autocast import hooks, state

# What is the same in tf_keras as in Keras 2.15 is not run twice where both Keras 3 and tf_keras are.
for_one_keras_of_each_kind = for_every_keras("keras3", "keras2")

_Way = Callable[[Callable[..., Any]], Callable[..., Any]]

_REFUSED = r"a tf.function is traced within tfmp.autocast"


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_WAYS = pytest.mark.parametrize("way", [_eager, tf.function], ids=["eager", "function"])


def _x() -> tf.Tensor:
    return tf.constant([[1.0, 2.0], [3.0, 4.0]])


def _dense(keras: ModuleType, units: int, activation: str | None = None, **settings: Any) -> Any:
    # Random initializers of Keras 2.15 warn.
    return keras.layers.Dense(units, activation, **{"kernel_initializer": "ones"} | settings)


def _types(tensors: Any) -> list[str]:
    return [tf.as_dtype(each.dtype).name for each in tensors]


def _value(variable: Any) -> list[Any]:
    return np.asarray(variable).tolist()


@for_every_keras()
@_WAYS
def test_layers_between_raw_ops(keras: ModuleType, way: _Way) -> None:
    layer, w = _dense(keras, 2), tf.Variable(tf.ones([2, 2]))

    @tfmp.autocast()
    def forward(x: tf.Tensor) -> Any:
        hidden = x @ w
        between = layer(hidden)
        return [hidden, between, between @ w, tf.reduce_mean(between)]

    for _ in range(2):
        hidden, between, last, mean = way(forward)(_x())
        assert _types([hidden, last, mean]) == ["float16", "float16", "float32"]
        assert between.numpy().tolist() == [[6, 6], [14, 14]]
    assert _types(layer.weights) == ["float32"] * 2


@for_every_keras()
@pytest.mark.parametrize("run_eagerly", [True, False], ids=["eager", "function"])
def test_scope_in_the_call_of_a_model_trains(keras: ModuleType, run_eagerly: bool) -> None:
    found = []

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = _dense(keras, 3, "relu"), _dense(keras, 1)

        @tfmp.autocast()
        def call(self, x: Any, training: bool = False) -> Any:
            y = self.hidden(x)
            found.append((y @ tf.ones([3, 3])).dtype.name)
            return tf.cast(self.head(y), tf.float32)

    model = Model()
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=run_eagerly)
    x = np.random.default_rng(0).normal(size=[8, 2]).astype(np.float32)
    losses = model.fit(x, x[:, :1] + 1, batch_size=4, epochs=3, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0]
    assert set(found) == {"float16"}
    assert _types(model.weights) == ["float32"] * 4
    assert model.predict(x, verbose=0).dtype == np.float32
    assert np.isfinite(model.evaluate(x, x[:, :1], verbose=0))


@for_one_keras_of_each_kind
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_scope_in_a_train_step(keras: ModuleType, jit_compile: bool) -> None:
    class Model(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                with tfmp.autocast():
                    outputs = self(x, training=True)
                    loss = tf.reduce_mean(tf.square(outputs - y))
                scaled = self.optimizer.scale_loss(loss)
            grads = tape.gradient(scaled, self.trainable_variables)
            ops = tf.compat.v1.get_default_graph().get_operations()
            products.update(op.get_attr("T").name for op in ops if op.type == "MatMul")
            types.append(_types(grads))
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"half_loss": loss}

    types: list[list[str]] = []
    products: set[str] = set()
    model = Model([keras.Input([2]), _dense(keras, 3, "relu"), _dense(keras, 1)])
    model.compile(
        tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.01), tfmp.FixedLossScaleManager(1024.0)), jit_compile=jit_compile
    )
    x = np.random.default_rng(0).normal(size=[8, 2]).astype(np.float32)
    losses = model.fit(x, x[:, :1] + 1, batch_size=4, epochs=3, verbose=0, shuffle=False).history["half_loss"]
    assert losses[-1] < losses[0]
    assert products == {"float16"}
    assert {tuple(each) for each in types} == {("float32",) * 4}
    assert int(model.optimizer.applied_steps) == 6


@for_every_keras()
def test_fit_within_a_scope_is_refused_and_works_after_it(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([2]), _dense(keras, 1)])
    opt = keras.optimizers.SGD(0.01)
    # TensorFlow takes no new variables from a function whose first trace failed, for whatever reason.
    opt.build(model.trainable_variables)
    model.compile(opt, "mse")
    data = (np.ones([4, 2], np.float32), np.ones([4, 1], np.float32))
    with tfmp.autocast(), pytest.raises(RuntimeError, match=r"tfmp\.autocast"):
        model.fit(*data, verbose=0)
    assert (hooks.open_scopes._count, state._thread.scopes) == (0, [None])
    model.fit(*data, verbose=0)
    before = _value(model.weights[0])
    with tfmp.autocast():
        model.fit(*data, verbose=0)
    assert _value(model.weights[0]) != before


@for_every_keras()
@_WAYS
def test_first_call_of_a_model_builds_it_in_the_scope(keras: ModuleType, way: _Way) -> None:
    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = _dense(keras, 3), keras.layers.LayerNormalization()

        def call(self, x: Any) -> Any:
            return self.norm(self.inner(x) @ tf.ones([3, 2]))

    model = keras.Sequential([_dense(keras, 3, "relu"), _dense(keras, 2), Block()])

    @tfmp.autocast()
    def forward(x: tf.Tensor) -> Any:
        return model(x) @ tf.ones([2, 2])

    call = way(forward)
    assert call(_x()).dtype == tf.float16
    assert _types(model.weights) == ["float32"] * 8
    found = call(_x())
    assert np.isfinite(found.numpy()).all()
    assert model(_x()).dtype == tf.float32


@for_every_keras()
def test_functional_model_is_made_within_a_scope(keras: ModuleType) -> None:
    with tfmp.autocast():
        inputs = keras.Input([2])
        hidden = keras.layers.Activation("relu")(_dense(keras, 3)(inputs))
        model = keras.Model(inputs, _dense(keras, 1)(keras.layers.concatenate([hidden, inputs])))
    assert model(_x()).dtype == tf.float32
    assert _types(model.weights) == ["float32"] * 4
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    with tfmp.autocast():
        assert (model(_x()) @ tf.ones([1, 1])).dtype == tf.float16


@for_one_keras_of_each_kind
@_WAYS
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("float32", "float16"),
        ("mixed_float16", "float16"),
        ("mixed_bfloat16", "float16"),
        ("mixed_float16", "bfloat16"),
    ],
)
def test_layers_with_policies(keras: ModuleType, way: _Way, policy: str, dtype: str) -> None:
    layers = [_dense(keras, 3, "relu", dtype=policy), keras.layers.LayerNormalization(dtype=policy)]
    layers += [_dense(keras, 2, dtype="float32"), _dense(keras, 1, dtype=policy)]

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast(dtype):
            y = x * tf.constant([[1.0, 0.5]])
            for layer in layers:
                y = layer(y)
            loss = tf.reduce_sum(tf.cast(y, tf.float32))
        return loss, tape.gradient(loss, [each for layer in layers for each in layer.trainable_weights])

    loss, grads = way(step)(_x())
    assert np.isfinite(float(loss))
    assert _types(grads) == ["float32"] * 8


def _recurrent(keras: ModuleType, name: str, **settings: Any) -> Any:
    ones = {"kernel_initializer": "ones", "recurrent_initializer": "zeros"}
    return getattr(keras.layers, name)(2, **ones, **settings)


_LAYERS: dict[str, Callable[[ModuleType], Callable[[tf.Tensor], Any]]] = {
    "LSTM": lambda keras: _recurrent(keras, "LSTM", return_sequences=True),
    "LSTM unrolled": lambda keras: _recurrent(keras, "LSTM", unroll=True),
    "GRU": lambda keras: _recurrent(keras, "GRU", return_sequences=True),
    "SimpleRNN": lambda keras: _recurrent(keras, "SimpleRNN", return_sequences=True),
    "RNN": lambda keras: keras.layers.RNN(
        keras.layers.LSTMCell(2, kernel_initializer="ones", recurrent_initializer="zeros")
    ),
    "Conv1D": lambda keras: keras.layers.Conv1D(2, 2, kernel_initializer="ones"),
    "BatchNormalization": lambda keras: keras.layers.BatchNormalization(),
    "LayerNormalization": lambda keras: keras.layers.LayerNormalization(),
    "TimeDistributed": lambda keras: keras.layers.TimeDistributed(_dense(keras, 2)),
    "EinsumDense": lambda keras: keras.layers.EinsumDense("abc,cd->abd", [None, 2], kernel_initializer="ones"),
    "PReLU": lambda keras: keras.layers.PReLU(),
    "pool": lambda keras: keras.layers.GlobalAveragePooling1D(),
    "softmax": lambda keras: keras.layers.Softmax(),
}


@for_one_keras_of_each_kind
@_WAYS
@pytest.mark.parametrize("name", _LAYERS)
def test_layers_are_called_in_a_scope(keras: ModuleType, way: _Way, name: str) -> None:
    plain, layer = _LAYERS[name](keras), _LAYERS[name](keras)
    w = tf.Variable(tf.eye(2))
    x = tf.constant(np.random.default_rng(0).normal(size=[2, 3, 2]), tf.float32)

    def step(layer: Any, scope: Any, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, scope:
            y = layer(tf.einsum("abc,cd->abd", x, w))
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return [loss, y, *tape.gradient(loss, [w, *layer.trainable_weights])]

    expected = step(plain, tfmp.autocast(enabled=False), x)
    found = way(functools.partial(step, layer, tfmp.autocast()))(x)
    assert _types(found[2:]) == ["float32"] * (len(layer.trainable_weights) + 1)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.float32(other), np.float32(one), rtol=3e-2, atol=3e-2)
    assert set(_types(layer.weights)) <= {"float32"}


@for_every_keras()
@_WAYS
def test_recurrent_layer_with_a_mask_in_a_scope(keras: ModuleType, way: _Way) -> None:
    embedding = keras.layers.Embedding(4, 2, mask_zero=True, embeddings_initializer="ones")
    layer = _recurrent(keras, "LSTM")

    def step(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast():
            y = layer(embedding(ids))
            loss = tf.reduce_sum(tf.cast(y, tf.float32))
        grads = tape.gradient(loss, [*embedding.trainable_weights, *layer.trainable_weights])
        return y, [tf.convert_to_tensor(grad) for grad in grads]

    y, grads = way(step)(tf.constant([[1, 2, 3, 0], [1, 0, 0, 0]]))
    assert np.isfinite(y.numpy()).all()
    assert _types(grads) == ["float32"] * 4


@for_one_keras_of_each_kind
@_WAYS
def test_attention_with_a_mask_in_a_scope(keras: ModuleType, way: _Way) -> None:
    layer = keras.layers.MultiHeadAttention(2, 4, kernel_initializer="ones")
    x = tf.constant(np.random.default_rng(0).normal(size=[2, 3, 4]), tf.float32)
    mask = tf.constant([[[True, False, False]] * 3, [[True, True, False]] * 3])

    def step(scope: Any, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, scope:
            y = layer(x, x, attention_mask=mask)
            loss = tf.reduce_sum(tf.cast(y, tf.float32))
        return [y, *tape.gradient(loss, layer.trainable_weights)]

    expected = step(tfmp.autocast(enabled=False), x)
    found = way(functools.partial(step, tfmp.autocast()))(x)
    assert _types(found[1:]) == ["float32"] * 8
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.float32(other), np.float32(one), rtol=3e-2, atol=5e-2)


@for_one_keras_of_each_kind
@_WAYS
def test_images_are_classified_in_a_scope(keras: ModuleType, way: _Way) -> None:
    layers = [
        keras.layers.Conv2D(2, 2, kernel_initializer="ones", use_bias=False),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        _dense(keras, 3),
    ]
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.constant(np.random.default_rng(0).normal(size=[2, 5, 5, 1]), tf.float32)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast():
            y = x
            for layer in layers:
                y = layer(y, training=True) if "batch" in layer.name else layer(y)
            loss = loss_fn(tf.constant([0, 1]), y)
        return loss, tape.gradient(loss, [each for layer in layers for each in layer.trainable_weights])

    loss, grads = way(step)(x)
    assert (loss.dtype, float(loss)) == (tf.float32, pytest.approx(np.log(3), rel=1e-3))
    assert _types(grads) == ["float32"] * 5
    assert _types(layers[1].weights) == ["float32"] * 4
    assert np.abs(np.asarray(layers[1].weights[2])).max() > 0


@for_one_keras_of_each_kind
@_WAYS
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_optimizer_is_applied_within_the_scope(keras: ModuleType, way: _Way, name: str) -> None:
    def trained(within: bool) -> Any:
        w = tf.Variable([[0.5], [0.25]])
        opt = getattr(keras.optimizers, name)(0.125)
        opt.build([w])
        scope = tfmp.autocast()

        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape, scope:
                loss = tf.reduce_mean(tf.square(x @ w))
            grads = tape.gradient(loss, [w])
            with scope if within else tfmp.autocast(enabled=False):
                opt.apply_gradients(zip(grads, [w], strict=True))

        call = way(step)
        for _ in range(3):
            call(_x())
        return w

    assert trained(True).dtype == tf.float32
    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)


@_WAYS
def test_replicas_enter_the_scope_inside(two_replicas: tf.distribute.MirroredStrategy, way: _Way) -> None:
    with two_replicas.scope():
        w = tf.Variable(tf.ones([2, 2]))
        b = tf.Variable(tf.zeros([2]), synchronization=tf.VariableSynchronization.ON_READ, trainable=False)
    types = []

    def replica_step(x: tf.Tensor) -> tf.Tensor:
        offset = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        with tf.GradientTape() as tape, tfmp.autocast():
            y = x @ w + b
            loss = tf.reduce_mean(y) + offset
        grad = tape.gradient(loss, w)
        grad = tf.distribute.get_replica_context().all_reduce("sum", grad)
        types.append((y.dtype.name, loss.dtype.name, grad.dtype.name))
        w.assign(w - 0.25 * grad)
        return loss

    step = way(lambda x: two_replicas.reduce("sum", two_replicas.run(replica_step, (x,)), None))
    assert float(step(_x())) == 5 * 2 + 1
    assert set(types) == {("float16", "float32", "float32")}
    # The mean's gradient by w is [[1, 1], [1.5, 1.5]], on each of two replicas.
    assert w.numpy().tolist() == [[0.5, 0.5], [0.25, 0.25]]
    assert (hooks.open_scopes._count, state._thread.scopes) == (0, [None])


@_WAYS
def test_scope_around_replicas_is_refused(two_replicas: tf.distribute.MirroredStrategy, way: _Way) -> None:
    message = "strategy.run is called within tfmp.autocast.* Enter the scope inside of the function"

    def step(scope: Any) -> Any:
        with scope:
            return two_replicas.run(lambda: _x() @ _x())

    with pytest.raises(RuntimeError, match=message):
        way(functools.partial(step, tfmp.autocast()))()
    with pytest.raises(RuntimeError, match=message), tfmp.autocast(), two_replicas.scope():
        two_replicas.run(lambda: _x() @ _x())
    found = way(functools.partial(step, tfmp.autocast(enabled=False)))()
    assert _types(two_replicas.experimental_local_results(found)) == ["float32"] * 2


@_WAYS
def test_strategy_of_one_device(way: _Way) -> None:
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")

    def step(around: Any, inside: Any) -> Any:
        def replica_step() -> tf.Tensor:
            with inside:
                return _x() @ _x()

        with around:
            return strategy.run(replica_step)

    off = tfmp.autocast(enabled=False)
    assert way(functools.partial(step, off, tfmp.autocast()))().dtype == tf.float16
    with pytest.raises(RuntimeError, match=r"strategy.run is called within tfmp.autocast"):
        way(functools.partial(step, tfmp.autocast(), off))()


@_WAYS
def test_default_strategy_runs_within_a_scope(way: _Way) -> None:
    @tfmp.autocast()
    def step() -> tf.Tensor:
        return tf.distribute.get_strategy().run(lambda: _x() @ _x())

    assert way(step)().dtype == tf.float16


def test_data_of_a_strategy_is_read_in_a_scope(two_replicas: tf.distribute.MirroredStrategy) -> None:
    data = two_replicas.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(tf.ones([4, 2])).batch(2))
    w = tf.Variable(tf.ones([2, 2]))

    @tf.function
    def total(x: tf.Tensor) -> tf.Tensor:
        def replica_step(x: tf.Tensor) -> tf.Tensor:
            with tfmp.autocast():
                return tf.reduce_sum(x @ w)

        return two_replicas.reduce("sum", two_replicas.run(replica_step, (x,)), None)

    assert [float(total(x)) for x in data] == [8, 8]


@for_every_keras("keras3", "tf_keras")
@pytest.mark.home(None)
def test_fit_of_a_model_with_a_scope_on_two_replicas(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = _dense(keras, 1)

        @tfmp.autocast()
        def call(self, x: Any) -> Any:
            return tf.cast(self.head(x), tf.float32)

    with two_replicas.scope():
        model = Model()
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    x = np.ones([8, 2], np.float32)
    losses = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


@pytest.mark.graph
@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
def test_graph_with_variables_trains(session: tf.compat.v1.Session, use_resource: bool) -> None:
    v1 = tf.compat.v1
    if not use_resource and v1.control_flow_v2_enabled():
        pytest.skip("control flow v2 updates no reference variable")
    w = v1.get_variable("w", initializer=np.ones([2, 2], np.float32), use_resource=use_resource)
    b = v1.get_variable("b", [2], initializer=v1.zeros_initializer(), use_resource=use_resource)
    x = v1.placeholder(tf.float32, [None, 2])
    with tfmp.autocast():
        y = tf.matmul(x, w) + b
        hidden = tf.nn.bias_add(tf.matmul(y, w), b)
        loss = tf.reduce_mean(hidden / 2.0)
    opt = tfmp.LossScaleOptimizer(v1.train.GradientDescentOptimizer(0.125), 1024.0)
    grads_and_vars = opt.compute_gradients(loss, [w, b])
    step = opt.apply_gradients(grads_and_vars)
    session.run(v1.global_variables_initializer())
    before, _ = session.run([loss, step], {x: [[1, 2], [3, 4]]})
    assert _types([y, hidden, loss, *(grad for grad, _ in grads_and_vars)]) == ["float16"] * 2 + ["float32"] * 3
    assert before == 5
    assert session.run(loss, {x: [[1, 2], [3, 4]]}) < before
    assert int(session.run(opt.applied_steps)) == 1


@pytest.mark.graph
@pytest.mark.parametrize("name", ["GradientDescentOptimizer", "AdamOptimizer", "MomentumOptimizer"])
def test_minimize_within_the_scope_of_a_graph(name: str) -> None:
    def trained(within: bool) -> Any:
        v1 = tf.compat.v1
        with tf.Graph().as_default(), v1.Session() as session:
            w = v1.get_variable("w", initializer=np.full([2, 1], 0.5, np.float32))
            x = v1.placeholder(tf.float32, [None, 2])
            inner = getattr(v1.train, name)(*([0.125, 0.5] if name == "MomentumOptimizer" else [0.125]))
            opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(64.0))
            with tfmp.autocast():
                loss = tf.reduce_mean(tf.square(x @ w))
                step = opt.minimize(loss, var_list=[w]) if within else None
            step = step if within else opt.minimize(loss, var_list=[w])
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(step, {x: [[1, 2], [0.5, 0.25]]})
            assert int(session.run(opt.applied_steps)) == 3
            return session.run(w)

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)
    assert trained(True).tolist() != [[0.5], [0.5]]


def test_variables_of_a_graph_do_not_widen_an_activation(session: tf.compat.v1.Session) -> None:
    v1 = tf.compat.v1
    reference = v1.get_variable("reference", initializer=np.ones([2], np.float32), use_resource=False)
    resource = v1.get_variable("resource", initializer=np.ones([2], np.float32), use_resource=True)
    partitioned = v1.get_variable(
        "partitioned", [2], initializer=v1.ones_initializer(), partitioner=v1.fixed_size_partitioner(1)
    )
    with tfmp.autocast():
        y = _x() @ _x()
        results = [
            y + reference,
            y * resource,
            reference - y,
            y + resource.read_value(),
            y + reference.read_value(),
            y + reference.value(),
            y + tf.identity(reference),
            y + tf.convert_to_tensor(partitioned),
        ]
    session.run(v1.global_variables_initializer())
    assert _types(results) == ["float16"] * 8
    assert session.run(results[0]).tolist() == [[8, 11], [16, 23]]


_READS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda v: v,
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "tensor": tf.convert_to_tensor,
    "identity": tf.identity,
}


@_WAYS
@pytest.mark.parametrize("read", _READS)
def test_variables_do_not_widen_an_activation(way: _Way, read: str) -> None:
    v = tf.Variable([1.0, 1.0])

    @tfmp.autocast()
    def results(x: tf.Tensor) -> Any:
        y = x @ x
        return [y + _READS[read](v), _READS[read](v) - y]

    found = way(results)(_x())
    assert _types(found) == ["float16"] * 2
    assert found[0].numpy().tolist() == [[8, 11], [16, 23]]


@_WAYS
@pytest.mark.parametrize("read", ["itself", "tensor"])
def test_bias_of_a_variable_is_added_to_a_half_activation(way: _Way, read: str) -> None:
    v = tf.Variable([1.0, 1.0])

    @tfmp.autocast()
    def result(x: tf.Tensor) -> Any:
        return tf.nn.bias_add(x @ x, _READS[read](v))

    found = way(result)(_x())
    assert (found.dtype, found.numpy().tolist()) == (tf.float16, [[8, 11], [16, 23]])


@for_every_keras()
@_WAYS
def test_variables_of_keras_do_not_widen_an_activation(keras: ModuleType, way: _Way) -> None:
    v = getattr(keras, "Variable", tf.Variable)(np.ones([2], np.float32))

    @tfmp.autocast()
    def results(x: tf.Tensor) -> Any:
        y = x @ x
        # With the variable first, Keras 3 itself casts the activation to float32.
        return [y + v, tf.nn.bias_add(y, v), tf.add(y, v), tf.add(v, y), y * tf.convert_to_tensor(v)]

    assert _types(way(results)(_x())) == ["float16"] * 5


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in a future version:UserWarning")
@pytest.mark.parametrize("name", ["dense", "conv2d", "batch_normalization", "dropout"])
@pytest.mark.home("tf215")
def test_layers_of_tensorflow_1_in_a_scope(session: tf.compat.v1.Session, name: str) -> None:
    v1 = tf.compat.v1
    if not _has_v1_layers():
        pytest.skip("needs tf.compat.v1.layers, which went with Keras 2")
    settings: dict[str, dict[str, Any]] = {
        "dense": {"units": 2, "kernel_initializer": v1.ones_initializer(), "activation": tf.nn.relu},
        "conv2d": {"filters": 2, "kernel_size": 1, "kernel_initializer": v1.ones_initializer()},
        "batch_normalization": {"training": True, "momentum": 0.5},
        "dropout": {"rate": 0.5, "training": True, "seed": 1},
    }
    with tfmp.autocast():
        x = tf.reshape(_x(), [2, 1, 1, 2])
        y = tf.reshape(tf.reshape(x, [2, 2]) @ tf.eye(2), [2, 1, 1, 2])
        # The weights of these layers have the type of their input.
        z = getattr(v1.layers, name)(x if name in ("dense", "conv2d") else y, **settings[name])
        loss = tf.reduce_mean(tf.cast(z, tf.float32) ** 2)
    weights = v1.global_variables()
    trainable = v1.trainable_variables()
    updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    opt = tfmp.LossScaleOptimizer(v1.train.GradientDescentOptimizer(0.125), 1024.0)
    grads = tf.gradients(loss, [x, *trainable])
    step = opt.minimize(loss) if trainable else tf.no_op()
    session.run(v1.global_variables_initializer())
    found, _, _ = session.run([z, step, updates])
    assert np.isfinite(found).all()
    assert _types(weights) == ["float32"] * len(weights)
    assert _types(grads) == ["float32"] * len(grads)


def _has_v1_layers() -> bool:
    try:
        return hasattr(tf.compat.v1.layers, "dense")
    except (AttributeError, ImportError):
        return False


@_WAYS
def test_grad_scaler_trains_with_autocast(way: _Way) -> None:
    w, scaler = tf.Variable([[1.0], [1.0]]), tfmp.GradScaler(init_scale=2.0**10)
    opt = tf.compat.v1.train.GradientDescentOptimizer(0.125)
    types = []

    def step(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with tfmp.autocast():
                y = x @ w
                loss = tf.reduce_mean(y) * factor
            scaled = scaler.scale(loss)
        grads = tape.gradient(scaled, [w])
        types.append(_types([y, loss, *grads]))
        scaler.step(opt, zip(grads, [w], strict=True))
        scaler.update()
        return loss

    call = way(step)
    assert float(call(_x(), tf.constant(1.0))) == 5
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
    call(_x(), tf.constant(np.inf))
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
    assert float(scaler.get_scale()) == 2.0**9
    assert all(each == ["float16", "float32", "float32"] for each in types)


@_WAYS
def test_grad_scaler_works_wholly_within_a_scope(way: _Way) -> None:
    w, scaler = tf.Variable([[1.0], [1.0]]), tfmp.GradScaler(init_scale=2.0**10)
    opt = tf.compat.v1.train.GradientDescentOptimizer(0.125)

    @tfmp.autocast()
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scaled = scaler.scale(tf.reduce_mean(x @ w))
        grads = scaler.unscale(opt, tape.gradient(scaled, [w]))
        scaler.step(opt, zip(grads, [w], strict=True))
        scaler.update()

    call = way(step)
    call(_x())
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
    call(_x() * np.inf)
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
    assert float(scaler.get_scale()) == 2.0**9


@_WAYS
def test_scaled_half_loss_does_not_overflow(way: _Way) -> None:
    w, scaler = tf.Variable([[1.0], [1.0]]), tfmp.GradScaler(init_scale=2.0**20)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            with tfmp.autocast():
                loss = (x @ w)[0, 0]
                inside = scaler.scale(loss)
            outside = scaler.scale(loss)
        return [inside, outside, tape.gradient(outside, w)]

    inside, outside, grad = way(step)(_x() * 2.0**-8)
    assert _types([inside, outside]) == ["float32"] * 2
    assert float(inside) == float(outside) == 3 * 2.0**12
    assert grad.dtype == tf.float32


@_WAYS
def test_gradients_are_accumulated_in_a_loop_with_autocast(way: _Way) -> None:
    w = tf.Variable([[1.0], [1.0]])
    accumulator = tfmp.GradientAccumulator([w], 2)
    types = []

    def micro_batch(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            with tfmp.autocast():
                loss = tf.reduce_mean(x @ w)
            scaled = loss * 1024.0
        grads = tape.gradient(scaled, [w])
        types.append(grads[0].dtype.name)
        with tfmp.autocast():
            accumulator.add(grads, loss_scale=1024.0)

    call = way(micro_batch)
    call(_x())
    call(_x() * 3.0)
    assert bool(accumulator.is_full)
    assert accumulator.mean()[0].numpy().tolist() == [[4], [6]]
    assert set(types) == {"float32"}


@for_every_keras()
@pytest.mark.parametrize("run_eagerly", [True, False], ids=["eager", "function"])
def test_call_without_the_argument_training_keeps_its_signature(keras: ModuleType, run_eagerly: bool) -> None:
    class Layer(keras.layers.Layer):
        @tfmp.autocast()
        def call(self, x: Any) -> Any:
            return tf.cast(x @ tf.ones([2, 2]), tf.float32)

    model = keras.Sequential([keras.Input([2]), Layer(), _dense(keras, 1)])
    assert model(_x(), training=True).numpy().tolist() == [[6], [14]]
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=run_eagerly)
    x = np.ones([4, 2], np.float32)
    losses = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


@_WAYS
def test_probes_and_ranges_in_a_scope(way: _Way) -> None:
    @tfmp.autocast()
    def forward(x: tf.Tensor) -> tf.Tensor:
        return tfmp.ranges.probe(x @ x, "product") + 1.0

    assert way(forward)(_x()).dtype == tf.float16


def test_wrapped_optimizer_minimizes_a_function_with_a_scope() -> None:
    w = tf.Variable([[1.0], [1.0]])
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.125), 1024.0)
    opt.minimize(tfmp.autocast()(lambda: tf.reduce_mean(_x() @ w)), var_list=[w])
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
