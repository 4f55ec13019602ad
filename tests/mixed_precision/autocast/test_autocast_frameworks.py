"""Scopes around and within what frameworks compute: Keras, TensorFlow 1, strategies, and the tools of tfmp."""

import contextlib
import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Way, assert_as_plain, each_way, matrix, types
from kerases import for_every_keras
from levelled_models import CASES, Case

import tfmp

_PLAIN = contextlib.nullcontext()


def _dense(keras: ModuleType, units: int, activation: str | None = None, **settings: Any) -> Any:
    # Random initializers of Keras 2.15 warn.
    return keras.layers.Dense(units, activation, **{"kernel_initializer": "ones"} | settings)


def _masked(keras: ModuleType) -> Any:
    inputs = keras.Input([3], dtype="int32")
    x = keras.layers.Embedding(9, 2, mask_zero=True)(inputs)
    x = keras.layers.LSTM(2, return_sequences=True)(x)
    return keras.Model(inputs, keras.layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))


#: Models, the level that they are set to, and the type of the scope.
_NETS = {
    **{name: (case, "O0", "float16") for name, case in CASES.items()},
    "masks": (Case(_masked, np.array([[1, 2, 0], [1, 0, 0]])), "O0", "float16"),
    **{
        f"functional at {level} in {dtype}": (CASES["functional"], level, dtype)
        for level, dtype in (("O2", "float16"), ("O2-bfloat16", "float16"), ("O2", "bfloat16"))
    },
}


# What is the same in tf_keras as in Keras 2.15 is not run twice where both Keras 3 and tf_keras are.
@for_every_keras("keras3", "keras2")
@each_way
@pytest.mark.parametrize("name", _NETS)
def test_models_between_products_compute_and_train_as_in_none(keras: ModuleType, way: Way, name: str) -> None:
    case, level, dtype = _NETS[name]
    model = case.built(keras)
    weights = list(model.trainable_variables)
    variables = [each if isinstance(each, tf.Variable) else each.value for each in weights]

    def step(scope: Any, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, scope:
            before = tf.tensordot(x, tf.eye(x.shape[-1]), 1) if x.dtype.is_floating else x
            outputs = tf.nest.flatten(model(before, training=name == "convolutional"))
            after = [tf.tensordot(y, tf.eye(y.shape[-1], dtype=y.dtype), 1) for y in outputs]
            loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in after])
        return [*after, loss, *map(tf.convert_to_tensor, tape.gradient(loss, variables))]

    expected = step(_PLAIN, tf.constant(case.batch))
    tfmp.set_precision(model, level)
    found = way(functools.partial(step, tfmp.autocast(dtype)))(tf.constant(case.batch))
    num_outputs = len(expected) - 1 - len(variables)
    assert types(found) == [*[dtype] * num_outputs, *["float32"] * (1 + len(variables))]
    # Where layers normalize, small gradients are differences of large numbers.
    near = 0.12 if "bfloat16" in name else 3e-2
    for one, other in zip(found, expected, strict=True):
        largest = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=near, atol=near * largest)


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
    model.fit(*data, verbose=0)
    before = np.asarray(model.weights[0]).tolist()
    with tfmp.autocast():
        model.fit(*data, verbose=0)
        assert (model(matrix()) @ tf.ones([1, 1])).dtype == tf.float16
    assert np.asarray(model.weights[0]).tolist() != before


@for_every_keras("keras3", "keras2")
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_scope_in_a_train_step_trains_by_products_in_half(keras: ModuleType, jit_compile: bool) -> None:
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


@for_every_keras("keras3", "keras2")
@each_way
def test_optimizer_of_keras_applies_within_a_scope_as_outside(keras: ModuleType, way: Way) -> None:
    def trained(scope: Any) -> tf.Variable:
        w, opt = tf.Variable(matrix()), keras.optimizers.Adam(0.125)
        opt.build([w])

        def step() -> None:
            with scope:
                opt.apply_gradients([(matrix() / 4.0, w)])

        call = way(step)
        for _ in range(2):
            call()
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
    # The default strategy, which has one replica in the thread of the caller, runs within a scope.
    strategy = tf.distribute.get_strategy()
    assert way(functools.partial(step, tfmp.autocast()))().dtype == tf.float16


@pytest.mark.graph
@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
def test_graph_trains_with_minimize_inside_and_outside(use_resource: bool, within: bool) -> None:
    v1 = tf.compat.v1
    if not use_resource and v1.control_flow_v2_enabled():
        pytest.skip("control flow v2 updates no reference variable")

    def trained(scope: Any, around_step: Any) -> tuple[list[str], Any]:
        with tf.Graph().as_default(), v1.Session() as session:
            w = v1.get_variable("w", initializer=np.full([2, 2], 0.5, np.float32), use_resource=use_resource)
            b = v1.get_variable("b", [2], initializer=v1.zeros_initializer(), use_resource=use_resource)
            opt = tfmp.LossScaleOptimizer(v1.train.AdamOptimizer(0.125), tfmp.FixedLossScaleManager(64.0))
            with scope:
                y = tf.matmul([[1.0, 2.0], [0.5, 0.25]], w) + b
                loss = tf.reduce_mean(tf.square(tf.nn.bias_add(tf.matmul(y, w), b) / 2.0))
            with around_step:
                grads_and_vars = opt.compute_gradients(loss, [w, b])
                step = opt.apply_gradients(grads_and_vars)
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(step)
            assert int(session.run(opt.applied_steps)) == 3
            return types([y, loss, *(grad for grad, _ in grads_and_vars)]), session.run([w, b])

    found, expected = trained(tfmp.autocast(), tfmp.autocast() if within else _PLAIN), trained(_PLAIN, _PLAIN)
    assert found[0] == ["float16", "float32", "float32", "float32"]
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
def test_grad_scaler_and_accumulator_train_with_autocast_and_see_an_overflow(way: Way, within: bool) -> None:
    w, scaler = tf.Variable([[1.0], [1.0]]), tfmp.GradScaler(init_scale=2.0**10)
    opt, accumulator = tf.compat.v1.train.GradientDescentOptimizer(0.125), tfmp.GradientAccumulator([w], 1)

    def step(x: tf.Tensor) -> None:
        with tfmp.autocast() if within else _PLAIN:
            with tf.GradientTape() as tape:
                with tfmp.autocast():
                    loss = tf.reduce_mean(x @ w)
                scaled = scaler.scale(loss)
            accumulator.add(tape.gradient(scaled, [w]), scaler.loss_scale)
            scaler.step(opt, zip(scaler.unscale(opt, accumulator), [w], strict=True))
            scaler.update()

    call = way(step)
    call(matrix())
    assert w.numpy().tolist() == [[1 - 0.25], [1 - 0.375]]
    # Beyond the largest number of float16, and not of float32.
    call(matrix() * 2.0**16)
    assert (w.numpy().tolist(), float(scaler.get_scale())) == ([[1 - 0.25], [1 - 0.375]], 2.0**9)
