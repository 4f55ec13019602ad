"""The loss that check_precision differentiates is the one that `fit` of every Keras minimizes."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from checked_models import check, data, gradients, with_given_weights
from kerases import composed, for_every_keras, skip_before

import tfmp


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
    def call(self: Any, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(tf.reduce_mean(x**2))
        return x

    return composed(keras, call)


def _sequences(size: int = 4) -> Any:
    # Keras takes weights of examples, for sequences, only if there are as many steps as examples.
    return np.random.default_rng(size).normal(size=[8, 8, size]).astype(np.float32)


_X, _Y = data()
_WEIGHTS = np.arange(8, dtype=np.float32)
_IDS = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]] * 4)
_WEIGHTED: dict[str, Any] = {"weighted_metrics": []}


def _dense(k: ModuleType, *after: Any) -> list[Any]:
    return [k.Input([4]), k.layers.Dense(4, "relu", name="hidden"), *after, k.layers.Dense(1)]


def _objects(k: ModuleType) -> list[Any]:
    return ["mse", k.losses.MeanSquaredError(), _mean_of_squares]


def _functions(k: ModuleType) -> list[Any]:
    return ["mean_squared_error", k.losses.mean_squared_error, _squares, lambda *each: tf.reduce_mean(_squares(*each))]


def _of_classes(k: ModuleType) -> Case:
    sparse = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case([k.Input([4]), k.layers.Dense(3)], (_X, np.arange(8) % 3), [sparse], sparse)


def _with_masks(k: ModuleType) -> Case:
    layers = [k.layers.Embedding(10, 4, mask_zero=True), k.layers.Bidirectional(k.layers.LSTM(3)), k.layers.Dense(1)]
    return Case([k.Input([5], dtype="int32"), *layers], (_IDS, _Y), ["mse"])


def _with_dropout(k: ModuleType) -> Case:
    layers = [
        k.layers.TimeDistributed(k.Sequential([k.layers.Dense(3), k.layers.Dropout(0.5)])),
        k.layers.GRU(3, dropout=0.5, recurrent_dropout=0.5),
        k.layers.GaussianNoise(1.0),
    ]
    return Case([k.Input([8, 4]), *layers, k.layers.Dense(1)], (_sequences(), _Y), ["mse"])


_CASES: dict[str, Callable[[ModuleType], Case]] = {
    "plain": lambda k: Case(_dense(k), (_X, _Y), _objects(k) + _functions(k)),
    "float64": lambda k: Case(_dense(k), (np.float64(_X), np.float64(_Y)), _objects(k)),
    "flat labels": lambda k: Case(_dense(k), (_X, _Y[:, 0]), ["mse"]),
    "labels of integers": _of_classes,
    # Keras differentiates the sum, also where nothing is reduced.
    "summed": lambda k: Case(
        _dense(k), (_X, _Y), [k.losses.MeanSquaredError(reduction="none")], k.losses.MeanSquaredError(reduction="sum")
    ),
    "weights of examples": lambda k: Case(_dense(k), (_X, _Y, _WEIGHTS), _objects(k), settings=_WEIGHTED),
    "column of weights": lambda k: Case(_dense(k), (_X, _Y, _WEIGHTS[:, None]), ["mse"], settings=_WEIGHTED),
    "weights of sequences": lambda k: Case(
        [k.Input([8, 4]), k.layers.Dense(1)], (_sequences(), _sequences(1), _WEIGHTS), ["mse"], settings=_WEIGHTED
    ),
    "added losses": lambda k: Case(_dense(k, _adding(k)), (_X, _Y), ["mse"]),
    "added losses only": lambda k: Case([*_dense(k), _adding(k)], (_X, _Y), [], None),
    "regularized weights": lambda k: Case(
        [k.Input([4]), k.layers.Dense(1, kernel_regularizer="l2")], (_X, _Y), ["mse"]
    ),
    "regularized activations": lambda k: Case(
        [k.Input([4]), k.layers.Dense(4, activity_regularizer="l1"), k.layers.Dense(1)], (_X, _Y), ["mse"]
    ),
    "masks": _with_masks,
    "dropout": _with_dropout,
}


# Keras 2 itself warns that the metrics are not weighted.
@pytest.mark.parametrize("name", _CASES)
@for_every_keras("keras3", "keras2")
def test_loss_and_gradients_are_those_of_fit(keras: ModuleType, name: str) -> None:
    if name == "regularized activations":
        skip_before((3, 14), keras, "it cannot compute such a loss in float16")
    case = _CASES[name](keras)
    model = with_given_weights(keras.Sequential(case.layers))
    model.compile("sgd", case.loss, run_eagerly=True, **case.settings)
    x, y, weights = [*case.batch, None][:3]
    found = model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0)
    expected = pytest.approx(found[0] if isinstance(found, list) else found, rel=1e-5)
    x, y = (tf.cast(each, tf.float32) if np.asarray(each).dtype == np.float64 else tf.constant(each) for each in (x, y))
    weights = None if weights is None else tf.constant(weights)
    # Layers that draw do so as in inference, and no other layer here trains in another way.
    of_keras = gradients(model, lambda: model.compute_loss(x, y, model(x, training=False), weights))
    reports = [check(model, loss_fn, [case.batch]) for loss_fn in (None, *case.alike)]
    assert [report.loss for report in reports] == [expected] * len(reports)
    for report in reports:
        assert report.float16_loss == pytest.approx(report.loss, rel=1e-2)
        assert report.far_off == []
        found = sum((layer.weight_gradients for layer in report.layers), start=tfmp.ranges.RangeHistogram())
        of_all = tfmp.ranges.RangeHistogram.of(*of_keras)
        # Means that are taken in another order are rounded in another way, some across a power of two.
        assert np.abs(found.counts - of_all.counts).sum() <= 2


@for_every_keras("keras3", "keras2")
def test_loss_fn_goes_before_the_compiled_loss_whose_sum_is_taken_if_it_is_not_reduced(keras: ModuleType) -> None:
    model = with_given_weights(keras.Sequential([keras.Input([4]), keras.layers.Dense(1, name="only")]))
    summed, each = (keras.losses.MeanSquaredError(reduction=reduction) for reduction in ("sum", "none"))
    model.compile("sgd", each)
    expected, found = check(model, summed, [data()]), check(model, None, [data()])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found["only"].weight_gradients == expected["only"].weight_gradients
    assert found.suggested_loss_scale == expected.suggested_loss_scale
    assert check(model, "mae", [data()]).loss == pytest.approx(float(np.mean(np.abs(model(_X) - _Y))), rel=1e-6)


@for_every_keras()
def test_inputs_and_outputs_may_be_nests(keras: ModuleType) -> None:
    inputs = {name: keras.Input([4], name=name) for name in ("one", "two")}
    both = keras.layers.Concatenate(name="both")(list(inputs.values()))
    outputs = {name: keras.layers.Dense(1, name=name + "_out")(both) for name in ("a", "b")}
    model, other, label = with_given_weights(keras.Model(inputs, outputs)), *data(1)
    batch = ({"one": _X, "two": other}, {"a": _Y, "b": label})
    for losses, weights in (({"a": "mse", "b": "mae"}, {"a": 1.0, "b": 2.0}), ({"a": "mse", "b": "mse"}, None)):
        model.compile("sgd", losses, loss_weights=weights, run_eagerly=True)
        expected = pytest.approx(model.evaluate(*batch, verbose=0, return_dict=True)["loss"], rel=1e-6)
        assert check(model, None, [batch]).loss == expected
    # A loss by its name is that of each output.
    assert check(model, "mse", [batch]).loss == expected
    model.train_on_batch(*batch)


@for_every_keras("keras3")
def test_named_loss_is_computed_in_the_type_of_the_compiled_one(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    batch = (np.full([4, 1], 300.0), np.full([4, 1], 290.0))
    far = (np.full([4, 1], 300.0), np.zeros([4, 1]))
    assert check(model, "mse", [batch]).to_json() == check(model, None, [batch]).to_json()
    assert check(model, "mse", [far]).float16_loss == check(model, None, [far]).float16_loss == 90000
