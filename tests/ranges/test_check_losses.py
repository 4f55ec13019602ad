"""The loss that check_precision differentiates is the one that `fit` of every Keras minimizes."""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from checked_models import check, data, gradients, with_given_weights
from kerases import for_every_keras, skip_before

import tfmp

# The losses of tf_keras are those of Keras 2.15.
for_one_keras_of_each_kind = for_every_keras("keras3", "keras2")


class Case(NamedTuple):
    """A model, what it is compiled with, a batch, and what else `loss_fn` may be for the loss to be the same."""

    layers: list[Any]
    batch: Any
    alike: list[Any] = []  # noqa: RUF012 - a tuple's default, which no test changes
    loss: Any = "mse"
    settings: dict[str, Any] = {}  # noqa: RUF012 - as above


def _squares(labels: Any, outputs: Any) -> Any:
    return (tf.cast(outputs, tf.float32) - tf.cast(labels, tf.float32)) ** 2


def _mean_of_squares(labels: Any, outputs: Any) -> Any:
    return tf.reduce_mean(_squares(labels, outputs), axis=-1)


def _adding(keras: ModuleType) -> Any:
    class Adding(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(x**2))
            return x

    return Adding()


def _sequences(size: int = 4) -> Any:
    # Keras takes weights of examples, for sequences, only if there are as many steps as examples.
    return np.random.default_rng(size).normal(size=[8, 8, size]).astype(np.float32)


def _cases(keras: ModuleType) -> dict[str, Case]:
    layers, losses, (x, y), weights = keras.layers, keras.losses, data(), np.arange(8, dtype=np.float32)
    hidden, head = layers.Dense(4, "relu", name="hidden"), layers.Dense(1)
    dense = [keras.Input([4]), hidden, head]
    objects = ["mse", losses.MeanSquaredError(), _mean_of_squares]
    functions = [
        "mean_squared_error",
        losses.mean_squared_error,
        _squares,
        lambda *each: tf.reduce_mean(_squares(*each)),
    ]
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)
    ids = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]] * 4)
    weighted = {"weighted_metrics": []}
    return {
        "plain": Case(dense, (x, y), objects + functions),
        "float64": Case(dense, (np.float64(x), np.float64(y)), objects),
        "flat labels": Case(dense, (x, y[:, 0]), ["mse"]),
        "labels of integers": Case([keras.Input([4]), layers.Dense(3)], (x, np.arange(8) % 3), [sparse], sparse),
        "not reduced": Case(dense, (x, y), [], losses.MeanSquaredError(reduction="sum")),
        "weights of examples": Case(dense, (x, y, weights), objects, settings=weighted),
        "column of weights": Case(dense, (x, y, weights[:, None]), ["mse"], settings=weighted),
        "weights of sequences": Case(
            [keras.Input([8, 4]), head], (_sequences(), _sequences(1), weights), ["mse"], settings=weighted
        ),
        "added losses": Case([keras.Input([4]), hidden, _adding(keras), head], (x, y), ["mse"]),
        "added losses only": Case([keras.Input([4]), hidden, head, _adding(keras)], (x, y), [], None),
        "regularized weights": Case([keras.Input([4]), layers.Dense(1, kernel_regularizer="l2")], (x, y), ["mse"]),
        "regularized activations": Case(
            [keras.Input([4]), layers.Dense(4, activity_regularizer="l1"), head], (x, y), ["mse"]
        ),
        "masks": Case(
            [
                keras.Input([5], dtype="int32"),
                layers.Embedding(10, 4, mask_zero=True),
                layers.Bidirectional(layers.LSTM(3)),
                layers.Dense(1),
            ],
            (ids, y),
            ["mse"],
        ),
        "dropout": Case(
            [
                keras.Input([8, 4]),
                layers.TimeDistributed(keras.Sequential([layers.Dense(3), layers.Dropout(0.5)])),
                layers.GRU(3, dropout=0.5, recurrent_dropout=0.5),
                layers.GaussianNoise(1.0),
                layers.Dense(1),
            ],
            (_sequences(), y),
            ["mse"],
        ),
    }


_NAMES = [
    *("plain", "float64", "flat labels", "labels of integers", "not reduced", "weights of examples"),
    *("column of weights", "weights of sequences", "added losses", "added losses only", "regularized weights"),
    *("regularized activations", "masks", "dropout"),
]


# Keras 2 itself warns that the metrics are not weighted.
@pytest.mark.parametrize("name", _NAMES)
@for_one_keras_of_each_kind
def test_loss_and_gradients_are_those_of_fit(keras: ModuleType, name: str) -> None:
    if name == "regularized activations":
        skip_before((3, 14), keras, "it cannot compute such a loss in float16")
    case = _cases(keras)[name]
    model = with_given_weights(keras.Sequential(case.layers))
    model.compile("sgd", case.loss, run_eagerly=True, **case.settings)
    x, y, weights = [*case.batch, None][:3]
    found = model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0)
    expected = pytest.approx(found[0] if isinstance(found, list) else found, rel=1e-5)
    x, y = (tf.cast(each, tf.float32) if np.asarray(each).dtype == np.float64 else tf.constant(each) for each in (x, y))
    weights = None if weights is None else tf.constant(weights)
    # Layers that draw do so as in inference, and no other layer here trains in another way.
    of_keras = gradients(model, lambda: model.compute_loss(x, y, model(x, training=False), weights))
    if name == "not reduced":
        # Keras differentiates the sum.
        case.alike.append(keras.losses.MeanSquaredError(reduction="none"))
    reports = [check(model, loss_fn, [case.batch]) for loss_fn in (None, *case.alike)]
    assert [report.loss for report in reports] == [expected] * len(reports)
    for report in reports:
        assert report.float16_loss == pytest.approx(report.loss, rel=1e-2)
        assert report.far_off == []
        found = sum((layer.weight_gradients for layer in report.layers), start=tfmp.ranges.RangeHistogram())
        of_all = tfmp.ranges.RangeHistogram.of(*of_keras)
        # Means that are taken in another order are rounded in another way, some across a power of two.
        assert np.abs(found.counts - of_all.counts).sum() <= 2


@for_one_keras_of_each_kind
def test_loss_that_is_compiled_without_a_reduction_is_differentiated_as_its_sum(keras: ModuleType) -> None:
    model = with_given_weights(keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="only")]))
    summed, each = (keras.losses.MeanSquaredError(reduction=reduction) for reduction in ("sum", "none"))
    model.compile("sgd", each)
    expected, found = check(model, summed, [data()]), check(model, None, [data()])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found["only"].weight_gradients == expected["only"].weight_gradients
    assert found.suggested_loss_scale == expected.suggested_loss_scale


@for_one_keras_of_each_kind
def test_loss_fn_goes_before_the_compiled_loss(keras: ModuleType) -> None:
    model = with_given_weights(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    x, y = data()
    assert check(model, "mae", [(x, y)]).loss == pytest.approx(float(np.mean(np.abs(model(x) - y))), rel=1e-6)


@for_one_keras_of_each_kind
def test_inputs_and_outputs_may_be_nests(keras: ModuleType) -> None:
    inputs = {name: keras.Input([4], name=name) for name in ("one", "two")}
    both = keras.layers.Concatenate(name="both")(list(inputs.values()))
    outputs = {name: keras.layers.Dense(1, name=name + "_out")(both) for name in ("a", "b")}
    model = with_given_weights(keras.Model(inputs, outputs))
    model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 2.0}, run_eagerly=True)
    (x, y), (other, label) = data(), data(1)
    batch = ({"one": x, "two": other}, {"a": y, "b": label})
    expected = model.evaluate(*batch, verbose=0, return_dict=True)["loss"]
    assert check(model, None, [batch]).loss == pytest.approx(expected, rel=1e-6)
    model.train_on_batch(*batch)


@for_every_keras()
def test_named_loss_of_several_outputs_is_the_sum(keras: ModuleType) -> None:
    inputs = keras.Input([4])
    model = with_given_weights(keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)]))
    model.compile("sgd", ["mse", "mse"], run_eagerly=True)
    x, y = data()
    expected = model.evaluate(x, [y, y], verbose=0)[0]
    assert check(model, "mse", [(x, (y, y))]).loss == pytest.approx(expected, rel=1e-6)


@for_every_keras("keras3")
def test_named_loss_is_computed_in_the_type_of_the_compiled_one(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    batch = (np.full([4, 1], 300.0), np.full([4, 1], 290.0))
    far = (np.full([4, 1], 300.0), np.zeros([4, 1]))
    assert check(model, "mse", [batch]).to_json() == check(model, None, [batch]).to_json()
    assert check(model, "mse", [far]).float16_loss == check(model, None, [far]).float16_loss == 90000
