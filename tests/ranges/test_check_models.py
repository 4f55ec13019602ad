"""What check_precision measures of models of every Keras: their layers, ranges and errors; of rarer kinds too."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import check, data, dense_model, gradients, mse, names, state, stateful_model, with_given_weights
from kerases import composed, for_every_keras

import tfmp

_histogram = tfmp.ranges.RangeHistogram.of


@for_every_keras()
def test_shared_layer_counts_all_its_calls_and_equal_names_are_told_apart(keras: ModuleType) -> None:
    inputs = keras.Input([4])
    shared = keras.layers.Dense(4, name="shared")
    sides = [
        keras.Sequential([keras.Input([4]), keras.layers.Dense(4, name="same")], name=n) for n in ("left", "right")
    ]
    outer = keras.Model(inputs, keras.layers.Add(name="sum")([shared(side(inputs)) for side in sides]), name="outer")
    again = keras.Input([4])
    model = with_given_weights(keras.Model(again, keras.layers.Dense(1, name="head")(outer(again)), name="model"))
    x, y = data()
    report = check(model, "mse", [(x, y)])
    assert sorted(names(report)) == ["head", "outer/left/same", "outer/right/same", "shared", "sum"]
    assert names(report)[-2:] == ["sum", "head"]
    assert report["shared"].activations == _histogram(*(shared(side(x)) for side in sides))
    assert report["outer/left/same"].activations == _histogram(sides[0](x))
    assert report["shared"].weights.total == 4 * 4 + 4
    assert report.keep_float32 == report.far_off == []


def _attending(keras: ModuleType) -> Any:
    """Make a model with weights of its own, and layers of every kind that computes in a way of its own."""

    def call(self: Any, ids: tf.Tensor) -> tf.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.attend(x, x))
        return self.head(self.lstm(x)) + tf.cast(self.shift, self.compute_dtype)

    parts = {
        "embed": keras.layers.Embedding(10, 4, name="embed"),
        "attend": keras.layers.MultiHeadAttention(2, 2, name="attend"),
        "norm": keras.layers.LayerNormalization(name="norm"),
        "lstm": keras.layers.LSTM(3, name="lstm"),
        "head": keras.layers.Dense(1, name="head"),
    }
    model = composed(keras, call, "Model", {"name": "net"}, **parts)
    model.shift = model.add_weight(shape=[1], initializer="ones", name="shift")
    return model


@for_every_keras()
def test_subclassed_model_is_seen_through_its_layers_and_its_own_weights(keras: ModuleType) -> None:
    model = _attending(keras)
    ids, y = np.arange(40).reshape(8, 5) % 10, data()[1]
    model(ids)
    with_given_weights(model)
    report = check(model, "mse", [(ids, y)])
    assert {"embed", "attend", "norm", "lstm", "head", "net"} <= set(names(report))
    assert report["embed"].activations == _histogram(model.embed(ids))
    assert report["net"].activations == _histogram(model(ids))
    assert report["net"].weights == _histogram(tf.convert_to_tensor(model.shift))
    expected = gradients(model, lambda: mse(model(ids, training=True), y))
    found = sum((layer.weight_gradients for layer in report.layers), start=tfmp.ranges.RangeHistogram())
    assert found == _histogram(*expected)
    errors = [layer.relative_error for layer in report.layers if layer.relative_error is not None]
    assert (report.keep_float32, report.far_off, 0 < max(errors) < 0.05) == ([], [], True)
    assert report.float16_loss == pytest.approx(report.loss, rel=1e-2)


@for_every_keras()
def test_ranges_and_errors_are_those_of_layers_called_by_hand_and_of_a_model_in_mixed_precision(
    keras: ModuleType,
) -> None:
    (x, y), model, twin = data(), dense_model(keras), dense_model(keras, "mixed_float16")
    hidden, output = model.layers

    def product(labels: Any, outputs: Any) -> Any:
        return labels * tf.cast(outputs, tf.float32)

    report = check(model, product, [(x, y)])
    with tf.GradientTape() as tape:
        between = hidden(x)
        tape.watch(between)
        loss = tf.reduce_mean(product(y, output(between)))
    of_activation, scale = tape.gradient(loss, between), report.suggested_loss_scale
    exact = gradients(model, lambda: tf.reduce_mean(product(y, model(x))))
    rounded = gradients(twin, lambda: tf.reduce_mean(product(y, twin(x))), scale)
    for name, part in (("hidden", slice(0, 2)), ("o", slice(2, 4))):
        one, other = (np.concatenate([np.float64(grad).ravel() for grad in each[part]]) for each in (exact, rounded))
        error = np.linalg.norm(one - other / scale) / np.linalg.norm(one)
        assert 0 < error < 1e-2
        assert report[name].relative_error == pytest.approx(error, rel=1e-9)
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert report[name].cosine == pytest.approx(cosine, rel=1e-12)
        assert report[name].weight_gradients == _histogram(*exact[part])
    assert report["hidden"] == tfmp.ranges.LayerPrecision(
        name="hidden",
        activations=_histogram(between),
        largest_activation=float(tf.reduce_max(between)),
        activation_gradients=_histogram(of_activation),
        weights=_histogram(*map(tf.convert_to_tensor, hidden.trainable_variables)),
        weight_gradients=_histogram(*exact[:2]),
        cosine=report["hidden"].cosine,
        relative_error=report["hidden"].relative_error,
    )
    assert report["o"].activations == _histogram(model(x))
    assert report.loss == pytest.approx(float(loss), rel=1e-6)
    assert report.float16_loss == float(tf.reduce_mean(product(y, twin(x))))


@for_every_keras()
def test_batch_normalization_uses_the_batch_and_dropout_does_not_act(keras: ModuleType) -> None:
    (x, y), model = data(), stateful_model(keras)
    report = check(model, "mse", [(10 * x + 3, y)])
    hidden, norm, _, output = model.layers
    normalized = norm(hidden(10 * x + 3), training=True)
    assert report["norm"].activations == report["drop"].activations == _histogram(normalized)
    assert report["norm"].activations != _histogram(norm(hidden(10 * x + 3), training=False))
    assert report.loss == float(mse(output(normalized), y))


@for_every_keras()
def test_layers_within_a_layer_that_draws_or_passes_training_by_position_do_so_too(keras: ModuleType) -> None:
    class Block(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, name="drop")
            if keras.__version__.startswith("3."):
                self.seed = keras.random.SeedGenerator(1)

        def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            # Keras 3 takes no positional arguments but tensors.
            x = self.norm(x, training=training)
            return self.drop(x, training=training) if hasattr(self, "seed") else self.drop(x, training)

    block = Block()
    model, (x, y) = keras.Sequential([keras.Input([4]), block, keras.layers.Dense(1)]), data()
    report = check(model, "mse", [(10 * x + 3, y)])
    assert report["drop"].activations == _histogram(block.norm(10 * x + 3, training=True))


@pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "mixed_bfloat16"])
@for_every_keras()
def test_ranges_are_those_of_float32_whatever_the_types_of_the_model(keras: ModuleType, policy: str) -> None:
    (x, y), model, plain = data(), dense_model(keras, policy), dense_model(keras)
    if policy == "float16":
        for weight in (*plain.weights, *model.weights):
            weight.assign(np.float16(np.asarray(weight)))
    before = state(model)
    report, expected = check(model, "mse", [(x, y)]), check(plain, "mse", [(x, y)])
    assert state(model) == before
    assert report.loss == expected.loss
    for layer in expected.layers:
        found = report[layer.name]
        assert found.activations == layer.activations
        assert found.activation_gradients == layer.activation_gradients
        if policy == "float16":
            # The gradients for variables in float16 are in float16 in either run.
            assert found.relative_error < 1e-3
        else:
            assert found == layer


@for_every_keras("keras3", "keras2")
def test_batches_are_taken_one_by_one_and_summed_whatever_gives_them(keras: ModuleType) -> None:
    model, batches = dense_model(keras), [data(seed) for seed in range(2)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    given = (data(seed) for seed in range(4))
    reports = [check(model, "mse", each, num_batches=2) for each in (batches, dataset, dataset.repeat(), given)]
    assert [report.to_json() for report in reports] == [reports[0].to_json()] * 4
    # A generator gives no more than are taken.
    np.testing.assert_array_equal(next(given)[0], data(2)[0])
    assert check(model, "mse", given).batches == 1
    single = [check(model, "mse", [batch]) for batch in batches]
    assert reports[0].loss == sum(report.loss for report in single) / 2
    assert reports[0]["o"].activations == single[0]["o"].activations + single[1]["o"].activations
    assert (reports[0].batches, reports[0]["o"].weights.total) == (2, 5)
    # Eight are enough.
    assert check(model, "mse", dataset.repeat()).batches == 8


def _with_operations(keras: ModuleType) -> Any:
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4, name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="head")(hidden + hidden * 2.0))


def _recomputed(keras: ModuleType) -> Any:
    block = keras.Sequential([keras.layers.Dense(4, "relu", name="up"), keras.layers.Dense(4, name="down")])
    return keras.Sequential([keras.Input([4]), tfmp.Recompute(block, name="block"), keras.layers.Dense(1, name="head")])


def _raw(**settings: Any) -> Callable[[ModuleType], Any]:
    """Make a layer that holds its variables in a dictionary and in a tuple, and computes by ops of TensorFlow."""

    def make(keras: ModuleType) -> Any:
        class Raw(keras.layers.Layer):  # type: ignore[name-defined]
            def build(self, input_shape: Any) -> None:
                kernels = [self.add_weight(shape=(4, 1), initializer="ones", name=name) for name in "ab"]
                self.by_name, self.in_tuple = {"a": kernels[0]}, (kernels[1],)
                self.built = True

            def call(self, x: tf.Tensor) -> tf.Tensor:
                return tf.matmul(x, self.by_name["a"]) + tf.matmul(x, self.in_tuple[0])

        return keras.Sequential([keras.Input([4]), Raw(name="raw", **settings)])

    return make


def _with_two_layers_of_a_name(keras: ModuleType) -> Any:
    one, two = keras.layers.Dense(4, name="same"), keras.layers.Dense(1, name="same")
    return composed(keras, lambda self, x: self.two(self.one(x)), "Model", one=one, two=two)


def _with_a_layer_of_integers_that_is_not_called(keras: ModuleType) -> Any:
    ids, head = keras.layers.Layer(dtype="int32", name="ids"), keras.layers.Dense(1, name="head")
    return composed(keras, lambda self, x: self.head(x), "Model", ids=ids, head=head)


def _with_a_cell_that_is_none(keras: ModuleType) -> Any:
    parts = {"cell": 3, "cells": 3, "_random_generator": np.ones(2), "dense": keras.layers.Dense(1, name="dense")}
    own = composed(keras, lambda self, x: self.dense(x), settings={"name": "own"}, **parts)
    return keras.Sequential([keras.Input([4]), own])


def _of_sparse_inputs(keras: ModuleType) -> Any:
    return keras.Sequential([keras.Input([4], sparse=True), keras.layers.Dense(1, name="head")])


_KINDS: dict[str, tuple[Callable[[ModuleType], Any], dict[str, int]]] = {
    "operations": (_with_operations, {"hidden": 20, "head": 5}),
    "recomputed": (_recomputed, {"up": 20, "down": 20, "head": 5}),
    "variables in dicts and tuples": (_raw(), {"raw": 8}),
    "raw code in float16": (_raw(dtype="float16"), {"raw": 8}),
    "two layers of a name": (_with_two_layers_of_a_name, {"same": 20, "same (2)": 5}),
    "a layer of integers that is not called": (_with_a_layer_of_integers_that_is_not_called, {"head": 5}),
    "a cell that is none": (_with_a_cell_that_is_none, {"dense": 5, "own": 0}),
    "sparse inputs": (_of_sparse_inputs, {"head": 5}),
}


@pytest.mark.filterwarnings(r"ignore:`build\(\)` was called on layer:UserWarning")
@pytest.mark.parametrize(("make", "weights"), _KINDS.values(), ids=_KINDS)
@for_every_keras()
def test_models_of_rarer_kinds_are_checked_and_as_before(
    keras: ModuleType, make: Callable[[ModuleType], Any], weights: dict[str, int]
) -> None:
    model, (x, y) = make(keras), data()
    x = tf.sparse.from_dense(x) if make is _of_sparse_inputs else x
    model(x)
    with_given_weights(model)
    before, outputs = state(model), model(x).numpy().tolist()
    report = check(model, "mse", [(x, y)])
    assert (state(model), model(x).numpy().tolist()) == (before, outputs)
    found = {layer.name: layer.weights.total for layer in report.layers}
    assert {name: found[name] for name in weights} == weights
    assert sum(found.values()) == sum(weights.values())
    assert report.loss > 0
