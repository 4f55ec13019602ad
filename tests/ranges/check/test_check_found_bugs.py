"""Tests that fail: each one is a bug that was found. Run in tests/ranges/check, where checked_models.py is."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import called, check, data, state, stateful_model, with_given_weights
from kerases import for_every_keras

import tfmp

pytestmark = pytest.mark.filterwarnings("ignore:non-integer arguments to randrange:DeprecationWarning")


# 1 (Keras 2, tf_keras): `called_through` deletes the `call` that a TFOpLambda has in its own __dict__.
@for_every_keras()
def test_operations_between_layers_are_as_before(keras: ModuleType) -> None:
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4)(inputs)
    model = called(keras.Model(inputs, keras.layers.Dense(1)(hidden + inputs * 2.0)))
    (x, y), before = data(), state(model)
    expected = model(x).numpy().tolist()
    check(model, "mse", [(x, y)])
    assert model(x).numpy().tolist() == expected
    assert state(model) == before


# 2 (all): the recomputation calls layers during tape.gradient, and `outputs` grows.
@for_every_keras()
def test_recomputed_layers_are_checked(keras: ModuleType) -> None:
    block = keras.Sequential([keras.layers.Dense(4, "relu", name="up"), keras.layers.Dense(4, name="down")])
    inputs = keras.Input([4])
    model = called(keras.Model(inputs, keras.layers.Dense(1, name="head")(tfmp.Recompute(block)(inputs))))
    assert check(model, "mse", [data()])["up"].weights.total == 20


# 3 (Keras 3): StatelessScope.get_current_value returns None in `_get_regularization_losses`.
@pytest.mark.parametrize("loss_fn", [None, "mse"])
@for_every_keras()
def test_weight_regularizers_belong_to_the_loss(keras: ModuleType, loss_fn: str | None) -> None:
    model = called(keras.Sequential([keras.Input([4]), keras.layers.Dense(1, kernel_regularizer="l2")]))
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = data()
    assert check(model, loss_fn, [(x, y)]).loss == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-6)


# 4 (Keras 2, tf_keras): metrics of the compiled loss are updated in cross-replica context.
@for_every_keras()
def test_compiled_loss_of_two_replicas(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        model = stateful_model(keras)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    state(model)
    assert check(model, None, [data()]).loss > 0


# 5 (all): weights of shape [n, 1] with values of shape [n] are broadcast to [n, n];
# (Keras 2, tf_keras): so are weights [n] with values [n, t], and labels [n] with outputs [n, 1].
@pytest.mark.parametrize("kind", ["column of weights", "weights of sequences", "flat labels"])
@for_every_keras()
def test_named_loss_is_that_of_fit(keras: ModuleType, kind: str) -> None:
    is_sequence = kind == "weights of sequences"
    model = with_given_weights(keras.Sequential([keras.Input([8, 4] if is_sequence else [4]), keras.layers.Dense(1)]))
    model.compile("sgd", "mse", weighted_metrics=[], run_eagerly=True)
    rng = np.random.default_rng(0)
    x, y = data()
    weights: Any = np.arange(8, dtype=np.float32)
    if is_sequence:
        x, y = (rng.normal(size=[8, 8, size]).astype(np.float32) for size in (4, 1))
    elif kind == "column of weights":
        weights = weights[:, None]
    else:
        y, weights = y[:, 0], None
    expected = model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0)
    for loss_fn in (None, "mse"):
        assert check(model, loss_fn, [(x, y, weights)]).loss == pytest.approx(expected, rel=1e-5), loss_fn


# 6 (Keras 3): a name is the bare function, which computes in float16; compiled, the loss is computed in float32.
@for_every_keras("keras3")
def test_named_loss_is_computed_in_the_type_of_the_compiled_one(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    batch = (np.full([4, 1], 300.0), np.full([4, 1], 290.0))
    far = (np.full([4, 1], 300.0), np.zeros([4, 1]))
    assert check(model, "mse", [batch]).to_json() == check(model, None, [batch]).to_json()
    assert check(model, "mse", [far]).float16_loss == check(model, None, [far]).float16_loss == 90000


# 7 (Keras 2, tf_keras): `training` that is passed by position is not replaced, so that Dropout acts.
@for_every_keras("keras2", "tf_keras")
def test_dropout_does_not_act_if_training_is_positional(keras: ModuleType) -> None:
    class Positional(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.head = keras.layers.Dropout(0.5), keras.layers.Dense(1)

        def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            return self.head(self.drop(x, training))

    model, (x, y) = called(Positional()), data()
    report = check(model, "mse", [(x, y)])
    assert report["dropout" if "dropout" in str(report) else model.drop.name].activations.zeros == 0


# 8 (Keras 3): raw TensorFlow ops in a layer of policy "float16", whose variables are float16.
@for_every_keras()
def test_layer_of_float16_with_raw_operations(keras: ModuleType) -> None:
    class Raw(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            self.kernel = self.add_weight(shape=(input_shape[-1], 1), initializer="ones", name="kernel")
            self.built = True

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.matmul(x, self.kernel)

    model = keras.Sequential([keras.Input([4]), Raw(dtype="float16")])
    assert check(model, "mse", [data()]).loss > 0


# 9 (Keras 2, tf_keras): variables in dicts and tuples are not cast, and the float16 run fails.
@for_every_keras()
def test_variables_in_dicts_and_tuples(keras: ModuleType) -> None:
    class Held(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            kernels = [self.add_weight(shape=(4, 1), initializer="ones", name=name) for name in "ab"]
            self.by_name, self.in_tuple = {"a": kernels[0]}, (kernels[1],)
            self.built = True

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.matmul(x, self.by_name["a"]) + tf.matmul(x, self.in_tuple[0])

    model = keras.Sequential([keras.Input([4]), Held()])
    assert check(model, "mse", [data()]).loss > 0


# 10 (Keras 3): a layer with a SeedGenerator of its own is run in inference with all that is in it.
@for_every_keras("keras3")
def test_batch_normalization_within_a_layer_that_draws(keras: ModuleType) -> None:
    class Block(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.seed = keras.layers.BatchNormalization(name="norm"), keras.random.SeedGenerator(1)

        def build(self, input_shape: Any) -> None:
            self.norm.build(input_shape)
            self.built = True

        def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            return self.norm(x, training=training)

    block = Block()
    model, (x, y) = called(keras.Sequential([keras.Input([4]), block, keras.layers.Dense(1)])), data()
    report = check(model, "mse", [(10 * x + 3, y)])
    assert report["norm"].activations == tfmp.RangeHistogram.of(block.norm(10 * x + 3, training=True))


# 11 (all): sparse (and ragged) inputs.
@for_every_keras()
def test_sparse_inputs(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([4], sparse=True), keras.layers.Dense(1)])
    x, y = data()
    assert check(model, "mse", [(tf.sparse.from_dense(x), y)]).loss > 0


# 12: a probe in a tf.function that is traced during the check.
def test_function_traced_during_the_check() -> None:
    w = tf.Variable(2.0, name="w")

    @tf.function
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tfmp.probe(x * w, "within")

    assert "w" in [layer.name for layer in check(loss, None, [tf.constant(3.0)]).layers]


# 13: the loss of a graph, outside of `as_default()`, with session=.
@pytest.mark.graph
def test_session_is_enough_outside_of_the_graph() -> None:
    with tf.Graph().as_default() as graph:
        v = tf.compat.v1.get_variable("v", [], initializer=tf.compat.v1.ones_initializer())
        loss = v * 3.0
        session = tf.compat.v1.Session(graph=graph)
        session.run(v.initializer)
    assert check(loss, None, [None], session=session).loss == 3


# 14: triples for functions; "ValueError: too many values to unpack".
def test_weights_of_examples_for_functions() -> None:
    w = tf.Variable(2.0)
    batch = (tf.ones([2]), tf.zeros([2]), tf.constant([1.0, 3.0]))
    assert check(lambda x: x * w, lambda y, out: (out - y) ** 2, [batch]).loss == 8


# 15: float16 function of other variables: a bare KeyError: 'w'.
def test_in_float16_with_other_variables_is_refused_with_a_reason() -> None:
    w, half = tf.Variable(2.0, name="w"), tf.Variable(2.0, dtype=tf.float16, name="half")
    with pytest.raises(ValueError, match="w"):
        check(lambda x: x * w, None, [tf.ones([2])], in_float16=lambda x: tf.cast(x, tf.float16) * half)


# 16: OverflowError and a RuntimeWarning instead of an error that names the setting.
def test_loss_scale_of_a_picture_must_be_positive(tmp_path: Any) -> None:
    w = tf.Variable(2.0)
    with pytest.raises(ValueError, match="loss_scale must be greater than 0, got 0"):
        check(lambda x: x * w, None, [tf.ones([2])]).plot(tmp_path / "a.png", 0)


# 17: gradients that are NaN, while the loss is finite, are said not to be there.
def test_gradients_that_are_nan_are_not_called_0() -> None:
    w = tf.Variable(0.0)
    with pytest.raises(ValueError, match="NaN"):
        check(lambda x: tf.sqrt(w * x) * 0.0 + 1.0, None, [tf.constant(1.0)])


# 18: cosmetic: the table's last column is empty, and its rule ends in blanks.
def test_no_line_of_the_table_ends_in_blanks() -> None:
    w = tf.Variable(2.0)
    lines = str(check(lambda x: x * w, None, [tf.ones([2])])).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


# 19 (all): layers of one name in one layer are counted as one.
@for_every_keras()
def test_layers_of_the_same_name_in_one_model_are_told_apart(keras: ModuleType) -> None:
    class Same(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = keras.layers.Dense(4, name="same"), keras.layers.Dense(1, name="same")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.two(self.one(x))

    assert len(check(called(Same()), "mse", [data()]).layers) == 2


# 20 (Keras 3): a float16 loss of add_loss or an activity regularizer, with the compiled loss. (Keras 3.15 itself fails
# in the same way when such a model is trained in mixed_float16, so it could be said in words.)
@for_every_keras("keras3")
def test_activity_regularizers_with_the_compiled_loss(keras: ModuleType) -> None:
    model = called(keras.Sequential([keras.Input([4]), keras.layers.Dense(1, activity_regularizer="l2")]))
    model.compile("sgd", "mse")
    assert check(model, None, [data()]).loss > 0


# 21 (all): several outputs and one name of a loss: the lists are stacked, or broadcast, instead of being refused or
# summed up as `compile(loss="mse")` does.
@for_every_keras()
def test_named_loss_of_several_outputs_is_the_sum(keras: ModuleType) -> None:
    inputs = keras.Input([4])
    model = with_given_weights(keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)]))
    model.compile("sgd", ["mse", "mse"], run_eagerly=True)
    x, y = data()
    expected = model.evaluate(x, [y, y], verbose=0)[0]
    assert check(model, "mse", [(x, (y, y))]).loss == pytest.approx(expected, rel=1e-6)


# 22 (Keras 3.5 to 3.9): a Sequential or functional model of layers in mixed precision holds Cast operations between
# them, so that the float32 run rounds to float16, and overflows in it.
@for_every_keras("keras3")
def test_float32_run_of_a_mixed_model_does_not_overflow(keras: ModuleType) -> None:
    layers = [keras.layers.Dense(1, kernel_initializer="ones", dtype="mixed_float16", name=name) for name in "ab"]
    huge = keras.layers.Rescaling(1e5, dtype="float32", name="huge")
    model = keras.Sequential([keras.Input([1]), layers[0], huge, layers[1]])
    batch = (np.ones([1, 1]), np.ones([1, 1]))
    report = check(model, lambda labels, outputs: tf.cast(outputs, tf.float32) * labels, [batch])
    assert (report["huge"].largest_activation, report.loss) == (1e5, 1e5)
