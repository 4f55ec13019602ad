"""What check_precision finds in models of rarer kinds: with operations, regularizers, odd types, names or inputs."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import called, check, data, state, with_given_weights
from kerases import for_every_keras

import tfmp


@for_every_keras()
def test_operations_between_layers_are_as_before(keras: ModuleType) -> None:
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4)(inputs)
    model = called(keras.Model(inputs, keras.layers.Dense(1)(hidden + hidden * 2.0)))
    (x, y), before = data(), state(model)
    expected = model(x).numpy().tolist()
    check(model, "mse", [(x, y)])
    assert model(x).numpy().tolist() == expected
    assert state(model) == before


@for_every_keras()
def test_recomputed_layers_are_checked(keras: ModuleType) -> None:
    block = keras.Sequential([keras.layers.Dense(4, "relu", name="up"), keras.layers.Dense(4, name="down")])
    inputs = keras.Input([4])
    model = called(keras.Model(inputs, keras.layers.Dense(1, name="head")(tfmp.Recompute(block)(inputs))))
    assert check(model, "mse", [data()])["up"].weights.total == 20


@pytest.mark.parametrize("loss_fn", [None, "mse"])
@for_every_keras()
def test_weight_regularizers_belong_to_the_loss(keras: ModuleType, loss_fn: str | None) -> None:
    model = called(keras.Sequential([keras.Input([4]), keras.layers.Dense(1, kernel_regularizer="l2")]))
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = data()
    assert check(model, loss_fn, [(x, y)]).loss == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-6)


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


@for_every_keras("keras3")
def test_named_loss_is_computed_in_the_type_of_the_compiled_one(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    batch = (np.full([4, 1], 300.0), np.full([4, 1], 290.0))
    far = (np.full([4, 1], 300.0), np.zeros([4, 1]))
    assert check(model, "mse", [batch]).to_json() == check(model, None, [batch]).to_json()
    assert check(model, "mse", [far]).float16_loss == check(model, None, [far]).float16_loss == 90000


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
    assert report[model.drop.name].activations.zeros == 0


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
    assert report["norm"].activations == tfmp.ranges.RangeHistogram.of(block.norm(10 * x + 3, training=True))


@for_every_keras()
def test_sparse_inputs(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([4], sparse=True), keras.layers.Dense(1)])
    x, y = data()
    assert check(model, "mse", [(tf.sparse.from_dense(x), y)]).loss > 0


@for_every_keras()
def test_layers_of_the_same_name_in_one_model_are_told_apart(keras: ModuleType) -> None:
    class Same(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = keras.layers.Dense(4, name="same"), keras.layers.Dense(1, name="same")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.two(self.one(x))

    assert len(check(called(Same()), "mse", [data()]).layers) == 2


@for_every_keras()
def test_named_loss_of_several_outputs_is_the_sum(keras: ModuleType) -> None:
    inputs = keras.Input([4])
    model = with_given_weights(keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)]))
    model.compile("sgd", ["mse", "mse"], run_eagerly=True)
    x, y = data()
    expected = model.evaluate(x, [y, y], verbose=0)[0]
    assert check(model, "mse", [(x, (y, y))]).loss == pytest.approx(expected, rel=1e-6)


@for_every_keras("keras3")
def test_float32_run_of_a_mixed_model_does_not_overflow(keras: ModuleType) -> None:
    layers = [keras.layers.Dense(1, kernel_initializer="ones", dtype="mixed_float16", name=name) for name in "ab"]
    huge = keras.layers.Rescaling(1e5, dtype="float32", name="huge")
    model = keras.Sequential([keras.Input([1]), layers[0], huge, layers[1]])
    batch = (np.ones([1, 1]), np.ones([1, 1]))
    report = check(model, lambda labels, outputs: tf.cast(outputs, tf.float32) * labels, [batch])
    assert (report["huge"].largest_activation, report.loss) == (1e5, 1e5)


@for_every_keras("keras3")
def test_activity_regularizers_belong_to_the_loss(keras: ModuleType) -> None:
    model = called(keras.Sequential([keras.Input([4]), keras.layers.Dense(1, activity_regularizer="l2")]))
    # With the compiled loss, Keras 3.15 adds float16 to float32 and fails, as it does in training.
    without, (x, y) = tf.reduce_mean((model(data()[0]) - data()[1]) ** 2), data()
    assert check(model, "mse", [(x, y)]).loss > float(without)


def _adding(keras: ModuleType, base: str) -> Any:
    """Return a model with a block that adds what a layer with large values returns to what it takes, in raw code."""

    class Block(getattr(keras, base) if base == "Model" else keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="block")
            self.large = keras.layers.Dense(4, name="large", kernel_initializer=keras.initializers.Constant(1e5))

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return (x + self.large(x)) * 1e-6

    class Net(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), keras.layers.Dense(1, name="head")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(self.block(x))

    model = Net()
    model(data()[0])
    return model


@pytest.mark.parametrize("base", ["Layer", "Model"])
@for_every_keras()
def test_layer_whose_code_combines_the_types_is_kept_as_a_whole(keras: ModuleType, base: str) -> None:
    model, (x, y) = _adding(keras, base), data()
    report = check(model, "mse", [(x, y)])
    assert set(report.keep_float32) == {"large", "block"}
    assert "Keep block in float32: it combines what large returns in float32 with float16." in str(report)
    assert (report.float16_error, report.keeping_fails) == (None, False)
    # What the report says can be done.
    tfmp.set_precision(model, "O2", keep_float32=report.keep_float32)
    assert bool(tf.reduce_all(tf.math.is_finite(model(x))))


@for_every_keras()
def test_report_tells_what_to_do_where_no_layer_can_be_kept(keras: ModuleType) -> None:
    class Net(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            constant = keras.initializers.Constant(1e5)
            self.large = keras.layers.Dense(4, name="large", kernel_initializer=constant)
            self.small, self.head = keras.layers.Dense(4, name="small"), keras.layers.Dense(1, name="head")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head((self.small(x) + self.large(x)) * 1e-6)

    model, (x, y) = Net(), data()
    model(x)
    report = check(model, "mse", [(x, y)])
    assert (report.keep_float32, report.keeping_fails) == (["large"], True)
    assert report.to_dict()["keeping_fails"] is True
    text = str(report)
    assert "large does not fit into float16: its " in text
    assert "Keep large in float32" not in text
    assert "It does not help to keep that in float32" in text
    assert 'tfmp.set_precision(model, "O2-bfloat16")' in text
    # What the report says can be done.
    tfmp.set_precision(model, "O2-bfloat16")
    assert bool(tf.reduce_all(tf.math.is_finite(model(x))))


@pytest.mark.filterwarnings(r"ignore:`build\(\)` was called on layer:UserWarning")
@for_every_keras()
def test_layer_of_integers_that_is_not_called_is_no_obstacle(keras: ModuleType) -> None:
    class Net(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.ids, self.head = keras.layers.Layer(dtype="int32", name="ids"), keras.layers.Dense(1, name="head")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(x)

    assert [layer.name for layer in check(called(Net()), "mse", [data()]).layers] == ["head"]


@for_every_keras()
def test_cell_of_the_users_that_is_no_cell(keras: ModuleType) -> None:
    class Own(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.cell = self.cells = 3
            self.dense, self._random_generator = keras.layers.Dense(1, name="dense"), np.ones(2)

        def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            return self.dense(x)

    assert check(called(keras.Sequential([keras.Input([4]), Own()])), "mse", [data()])["dense"].weights.total == 5
