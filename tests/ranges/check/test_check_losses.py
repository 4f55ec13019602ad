"""The loss that check_precision differentiates is the one that `fit` of every Keras minimizes."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import called, check, data, dense_model, gradients, with_given_weights
from kerases import for_every_keras, skip_before

import tfmp

# The losses of tf_keras are those of Keras 2.15.
for_one_keras_of_each_kind = for_every_keras("keras3", "keras2")


def _evaluated(model: Any, *batch: Any) -> Any:
    x, y, weights = [*batch, None][:3]
    model.run_eagerly = True
    found = model.evaluate(x, y, sample_weight=weights, batch_size=len(x), verbose=0)
    return pytest.approx(found[0] if isinstance(found, list) else found, rel=1e-6)


@for_one_keras_of_each_kind
def test_name_object_function_and_compiled_loss_are_the_same(keras: ModuleType) -> None:
    model = dense_model(keras)
    model.compile("sgd", "mse")
    x, y = data()
    losses = ["mse", "mean_squared_error", keras.losses.MeanSquaredError(), keras.losses.mean_squared_error, None]
    losses += [lambda labels, outputs: (outputs - tf.cast(labels, outputs.dtype)) ** 2]
    reports = [check(model, each, [(x, y)]) for each in losses]
    assert [report.loss for report in reports] == [_evaluated(model, x, y)] * 6
    assert len({str(report["hidden"].weight_gradients.to_dict()) for report in reports}) == 1


@for_one_keras_of_each_kind
def test_loss_fn_goes_before_the_compiled_loss(keras: ModuleType) -> None:
    model = dense_model(keras)
    model.compile("sgd", "mse")
    x, y = data()
    assert check(model, "mae", [(x, y)]).loss == pytest.approx(float(np.mean(np.abs(model(x) - y))), rel=1e-6)


@for_one_keras_of_each_kind
def test_mean_is_taken_of_a_loss_of_any_shape(keras: ModuleType) -> None:
    model = dense_model(keras)
    x, y = data()
    mean = check(model, lambda labels, outputs: tf.reduce_mean((labels - tf.cast(outputs, tf.float32)) ** 2), [(x, y)])
    each = check(model, lambda labels, outputs: (labels - tf.cast(outputs, tf.float32)) ** 2, [(x, y)])
    assert each.loss == pytest.approx(mean.loss, rel=1e-6)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["object", "compiled"])
@for_one_keras_of_each_kind
def test_loss_that_is_not_reduced_is_differentiated_as_its_sum(keras: ModuleType, is_compiled: bool) -> None:
    model = dense_model(keras)
    x, y = data()
    summed, each = (keras.losses.MeanSquaredError(reduction=reduction) for reduction in ("sum", "none"))
    model.compile("sgd", each)
    expected, found = check(model, summed, [(x, y)]), check(model, None if is_compiled else each, [(x, y)])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found["hidden"].weight_gradients == expected["hidden"].weight_gradients
    assert found.suggested_loss_scale == expected.suggested_loss_scale


@for_one_keras_of_each_kind
def test_labels_may_be_integers(keras: ModuleType) -> None:
    model = with_given_weights(keras.Sequential([keras.Input([4]), keras.layers.Dense(3)]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    batch = (data()[0], np.arange(8) % 3)
    assert [check(model, each, [batch]).loss for each in (loss, None)] == [_evaluated(model, *batch)] * 2


# Keras 2 itself warns that the metrics are not weighted.
@pytest.mark.parametrize("kind", ["compiled", "object", "name", "function"])
@for_one_keras_of_each_kind
def test_weights_of_examples_are_those_of_fit(keras: ModuleType, kind: str) -> None:
    model = dense_model(keras)
    model.compile("sgd", "mse", weighted_metrics=[])
    x, y = data()
    weights = np.arange(8, dtype=np.float32)
    losses = {
        "compiled": None,
        "object": keras.losses.MeanSquaredError(),
        "name": "mse",
        "function": lambda labels, outputs: tf.reduce_mean((labels - tf.cast(outputs, tf.float32)) ** 2, axis=-1),
    }
    assert check(model, losses[kind], [(x, y, weights)]).loss == _evaluated(model, x, y, weights)


def _adding(keras: ModuleType) -> Any:
    class Adding(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(x**2))
            return x

    return Adding()


@pytest.mark.parametrize("loss_fn", [None, "mse"])
@for_one_keras_of_each_kind
def test_added_losses_belong_to_the_loss(keras: ModuleType, loss_fn: str | None) -> None:
    layers = [keras.layers.Dense(4, name="hidden"), _adding(keras), keras.layers.Dense(1)]
    model = called(keras.Sequential([keras.Input([4]), *layers]))
    model.compile("sgd", "mse")
    _assert_is_the_whole_loss(model, loss_fn)


@pytest.mark.parametrize("loss_fn", [None, "mse"])
@for_one_keras_of_each_kind
def test_activity_regularizers_belong_to_the_loss(keras: ModuleType, loss_fn: str | None) -> None:
    skip_before((3, 14), keras, "it cannot compute such a loss in float16")
    layers = [keras.layers.Dense(4, activity_regularizer="l1", name="hidden"), keras.layers.Dense(1)]
    model = called(keras.Sequential([keras.Input([4]), *layers]))
    model.compile("sgd", "mse")
    _assert_is_the_whole_loss(model, loss_fn)


def _assert_is_the_whole_loss(model: Any, loss_fn: str | None) -> None:
    x, y = data()

    def loss() -> tf.Tensor:
        outputs = model(x, training=True)
        return tf.add_n([tf.reduce_mean(tf.reduce_mean((outputs - y) ** 2, axis=-1)), *model.losses])

    by_hand = gradients(model, loss)
    report = check(model, loss_fn, [(x, y)])
    assert report.loss == _evaluated(model, x, y)
    assert report["hidden"].weight_gradients == tfmp.ranges.RangeHistogram.of(*by_hand[:2])
    assert report.float16_loss == pytest.approx(report.loss, rel=1e-2)


@for_one_keras_of_each_kind
def test_model_may_have_added_losses_only(keras: ModuleType) -> None:
    model = called(keras.Sequential([keras.Input([4]), keras.layers.Dense(1), _adding(keras)]))
    model.compile("sgd")
    x, y = data()
    assert check(model, None, [(x, y)]).loss == pytest.approx(float(tf.reduce_mean(model(x) ** 2)), rel=1e-6)


@for_one_keras_of_each_kind
def test_arrays_of_float64_are_taken_as_fit_takes_them(keras: ModuleType) -> None:
    model = dense_model(keras)
    x, y = data()
    reports = [check(model, "mse", [(dtype(x), dtype(y))]) for dtype in (np.float64, np.float32)]
    assert reports[0].to_json() == reports[1].to_json()


def _classifier(keras: ModuleType, gap: float) -> Any:
    """A model that returns a softmax of logits of which one exceeds the others by `gap`."""
    layers = [keras.layers.Dense(4, "relu", name="hidden"), keras.layers.Dense(3, "softmax", name="probabilities")]
    model = keras.Sequential([keras.Input([4]), *layers])
    kernel = np.zeros([4, 3], np.float32)
    kernel[0, 0], kernel[1] = gap, [0.1, 0.2, -0.3]
    model.set_weights([np.eye(4), np.zeros(4), kernel, np.zeros(3)])
    return model


def _cross_entropy(labels: Any, probabilities: Any) -> Any:
    found = tf.gather(tf.cast(probabilities, tf.float32), labels, batch_dims=1)
    return -tf.math.log(tf.clip_by_value(found, 1e-12, 1))


_PROBABILITY_IS_SMALL = "with its output in float16, the loss scale can be at most 1"
_PROBABILITY_IS_ZERO = "with its output in float16, 1 more layer is far off, and the loss scale can be at most 1"


@pytest.mark.parametrize(
    ("gap", "reason"),
    [(1.0, None), (12.7, _PROBABILITY_IS_SMALL), (20.0, _PROBABILITY_IS_ZERO)],
    ids=["fits", "small", "rounded-to-0"],
)
@for_every_keras()
def test_output_stays_in_float32_where_the_loss_cannot_do_with_its_rounding(
    keras: ModuleType, gap: float, reason: str | None
) -> None:
    """The gradient of a cross-entropy for a probability p is 1 / p."""
    model, x = _classifier(keras, gap), np.ones([8, 4], np.float32)
    x[:, 1] = np.linspace(0.5, 1, 8)
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    report = check(model, _cross_entropy, [(x, labels)])
    assert report.keep_float32 == ([] if reason is None else ["probabilities"])
    assert report["probabilities"].keep_float32 == reason
    assert report.far_off == []
    assert report.suggested_loss_scale >= 256


@for_every_keras()
def test_output_is_not_kept_where_that_does_not_help(keras: ModuleType) -> None:
    """The output of the hidden layer is what float16 rounds too much."""
    hidden = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="hidden")
    model = keras.Sequential([keras.Input([1]), hidden, keras.layers.Dense(1, kernel_initializer="ones", name="o")])
    batch = (np.full([4, 1], 1.25 * 2.0**-23, np.float32), np.ones([4, 1], np.float32))
    report = check(model, lambda labels, outputs: labels * tf.cast(outputs, tf.float32) * 2**20, [batch], tolerance=0.1)
    assert (report.keep_float32, report.far_off) == ([], ["hidden", "o"])
