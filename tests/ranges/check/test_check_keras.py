"""What check_precision finds in models of every Keras there is: Keras 3, Keras 2 and tf_keras."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import (
    check,
    data,
    dense_model,
    gradients,
    multiplying,
    overflowing_within,
    state,
    stateful_model,
    with_given_weights,
)
from kerases import for_every_keras

import tfmp

# What is the same in tf_keras as in Keras 2.15 is not run twice where both Keras 3 and tf_keras are.
for_one_keras_of_each_kind = for_every_keras("keras3", "keras2")


def _layer_of_ones(keras: ModuleType, units: int = 1, **settings: Any) -> Any:
    return keras.layers.Dense(units, use_bias=False, kernel_initializer="ones", **settings)


def _as_float32(labels: Any, outputs: Any) -> Any:
    """A loss whose gradient for the outputs is the labels."""
    return tf.cast(labels, tf.float32) * tf.cast(outputs, tf.float32)


def _mse(outputs: Any, labels: Any) -> tf.Tensor:
    # In the order in which Keras takes means.
    return tf.reduce_mean(tf.reduce_mean((outputs - labels) ** 2, axis=-1))


def _names(report: tfmp.ranges.PrecisionReport) -> list[str]:
    return [layer.name for layer in report.layers]


@for_every_keras()
def test_layer_with_large_activations_and_the_one_that_takes_them_are_kept(keras: ModuleType) -> None:
    layers = [_layer_of_ones(keras, name="first"), multiplying(keras, 1e5, "huge"), multiplying(keras, 2**-17, "next")]
    model = keras.Sequential([keras.Input([1]), *layers, _layer_of_ones(keras, name="last")])
    report = check(model, _as_float32, [(np.ones([2, 1]), np.ones([2, 1]))])
    assert (_names(report), report.keep_float32) == (["first", "huge", "next", "last"], ["huge", "next"])
    assert report["huge"].largest_activation == 1e5
    assert report["huge"].keep_float32 == "its activations reach 1e+05, and float16 ends at 65504"
    assert report["next"].keep_float32 == "its input reaches 1e+05, and float16 ends at 65504"
    assert "Keep huge in float32: its activations reach 1e+05, and float16 ends at 65504." in str(report)
    assert "Keep next in float32: its input reaches 1e+05, and float16 ends at 65504." in str(report)
    assert (report.far_off, report["last"].relative_error) == ([], pytest.approx(0, abs=1e-3))


@for_one_keras_of_each_kind
def test_last_layer_with_large_activations_is_kept_alone(keras: ModuleType) -> None:
    layers = [_layer_of_ones(keras, name="first"), multiplying(keras, 1e5, "huge")]
    model = keras.Sequential([keras.Input([1]), *layers])
    report = check(model, _as_float32, [(np.ones([2, 1]), np.full([2, 1], 2**-10))])
    assert (report.keep_float32, report.far_off) == (["huge"], [])


@for_one_keras_of_each_kind
def test_layer_with_large_weights_is_kept(keras: ModuleType) -> None:
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(1e5), name="huge")
    model = keras.Sequential([keras.Input([1]), layer, _layer_of_ones(keras, name="last")])
    report = check(model, _as_float32, [(np.full([2, 1], 1e-3), np.ones([2, 1]))])
    assert report.keep_float32 == ["huge"]
    assert report["huge"].keep_float32 == "its weights reach 1e+05, and float16 ends at 65504"


@pytest.mark.parametrize(("factor", "kept"), [(65519.0, []), (65520.0, ["huge"])])
@for_one_keras_of_each_kind
def test_what_rounds_to_the_largest_number_of_float16_is_not_too_large(
    keras: ModuleType, factor: float, kept: list[str]
) -> None:
    model = keras.Sequential(
        [keras.Input([1]), _layer_of_ones(keras, name="first"), multiplying(keras, factor, "huge")]
    )
    report = check(model, _as_float32, [(np.ones([1, 1]), np.full([1, 1], 2**-12))])
    assert (report.keep_float32, report.far_off) == (kept, [])


@for_every_keras()
@pytest.mark.essential
def test_layers_that_overflow_only_within_are_found_by_the_float16_run(keras: ModuleType) -> None:
    overflowing = overflowing_within(keras)
    layers = [_layer_of_ones(keras, name="first"), overflowing(name="one"), multiplying(keras, 0.5, "half")]
    model = keras.Sequential([keras.Input([1]), *layers, overflowing(name="two")])
    report = check(model, _as_float32, [(np.full([2, 1], 2.0), np.ones([2, 1]))])
    assert report.keep_float32 == ["one", "two"]
    for name in report.keep_float32:
        assert report[name].largest_activation <= 2
        assert report[name].keep_float32 == "in float16 it returns infinities or NaN for finite inputs"
        assert f"Keep {name} in float32: in float16 it returns infinities or NaN for finite inputs." in str(report)
    assert (report["first"].relative_error, report.float16_loss, report.loss) == (0, 1, 1)


@for_every_keras()
def test_inner_layer_that_overflows_is_named_and_not_the_one_that_holds_it(keras: ModuleType) -> None:
    overflowing = overflowing_within(keras)

    class Block(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.first, self.inner = _layer_of_ones(keras, name="first"), overflowing(name="inner")

        def build(self, input_shape: Any) -> None:
            self.first.build(input_shape)
            self.built = True

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.inner(self.first(x)) * 2

    model = keras.Sequential([keras.Input([1]), Block(name="block")])
    report = check(model, _as_float32, [(np.ones([2, 1]), np.ones([2, 1]))])
    assert (_names(report), report.keep_float32) == (["first", "inner", "block"], ["inner"])
    assert (report.loss, report.float16_loss) == (2, 2)


# 90000 passes float16's limit in float32 already; 300 * 300 / 300 only on the way.
@pytest.mark.parametrize("factors", [(1e5,), (300.0, 300.0, 1 / 300)])
@for_every_keras()
def test_overflow_between_two_layers_is_told_from_one_within_a_layer(
    keras: ModuleType, factors: tuple[float, ...]
) -> None:
    class Net(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (_layer_of_ones(keras, name=name) for name in ("first", "second"))
            self.last = _layer_of_ones(keras, name="last")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            hidden = self.first(x)
            for factor in factors:
                hidden = hidden * factor
            return self.last(self.second(hidden) * 2**-10)

    model, x = Net(), np.ones([2, 1], np.float32)
    model(x)
    report = check(model, _as_float32, [(x, np.ones([2, 1]))])
    assert report.keep_float32[0] == "second"
    assert "first" not in report.keep_float32
    assert "last" not in report.keep_float32
    assert (
        "Keep second in float32: what it takes is infinite or NaN in float16, though no layer returned that: compute "
        "in float32, too, what the model computes between the layers before it and this one."
    ) in str(report)


@for_every_keras()
def test_model_that_cannot_run_in_float16_has_a_report_of_float32(keras: ModuleType) -> None:
    class OnlyFloat32(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first = _layer_of_ones(keras, name="first")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            returned = self.first(x)
            if returned.dtype == tf.float16:
                raise TypeError("no float16, please")
            return returned

    model = OnlyFloat32()
    model(np.ones([2, 1], np.float32))
    before = state(model)
    report = check(model, _as_float32, [(np.ones([2, 1]), np.ones([2, 1]))])
    assert report.float16_error is not None
    assert "no float16, please" in report.float16_error
    assert (report.suggested_loss_scale, report.float16_loss, report["first"].relative_error) == (2**12, None, None)
    assert "The model cannot be run in float16, so its gradients were not compared. TypeError: " in str(report)
    assert "no float16, please" in report.to_dict()["float16_error"]
    assert state(model) == before
    with pytest.raises(ValueError, match=r'so no level was set.*set_precision\(model, "O2-bfloat16"\)\. TypeError: '):
        report.apply(model)


@for_every_keras()
def test_layer_whose_code_fails_in_float16_is_kept(keras: ModuleType) -> None:
    class OnlyFloat32(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x * tf.constant([2.0])

    layers = [_layer_of_ones(keras, name="first"), OnlyFloat32(name="only"), _layer_of_ones(keras, name="last")]
    model = keras.Sequential([keras.Input([1]), *layers])
    model(np.ones([2, 1], np.float32))
    report = check(model, _as_float32, [(np.ones([2, 1]), np.ones([2, 1]))])
    assert (report.keep_float32, report.far_off, report.float16_error) == (["only"], [], None)
    assert report["only"].keep_float32 == (
        "its code fails in float16: cannot compute Mul as input #1(zero-based) was expected to be a half tensor but is "
        "a float tensor"
    )
    # What the report says can be done.
    report.apply(model)
    assert [layer.compute_dtype for layer in layers] == ["float16", "float32", "float16"]
    assert float(model(np.ones([1, 1], np.float32))[0, 0]) == 2


@for_every_keras()
def test_layer_is_not_kept_for_what_another_layer_computed(keras: ModuleType) -> None:
    """As T5 hands on the biases of attention, in which masked positions are -1e9."""

    class Biases(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.cast(x, tf.float32) - 1e9

    class Block(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.dense, self.biases = keras.layers.Dense(4, name=f"dense_of_{name}"), Biases(name=f"biases_of_{name}")

        def call(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self.dense(x), self.biases(x)

    inputs = keras.Input([4])
    first, biases = Block("block")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name="head")(first), biases])

    def loss(labels: Any, outputs: Any) -> Any:
        return _mse(tf.cast(outputs[0], tf.float32), labels)

    report = check(with_given_weights(model), loss, [data()])
    assert (report.keep_float32, report.far_off) == (["biases_of_block"], [])


@for_every_keras()
def test_second_look_confirms_what_was_applied_or_says_what_remains(keras: ModuleType) -> None:
    layers = [_layer_of_ones(keras, name="first"), multiplying(keras, 1e5, "huge"), multiplying(keras, 2**-17, "next")]
    model = keras.Sequential([keras.Input([1]), *layers, _layer_of_ones(keras, name="last")])
    batches = [(np.ones([2, 1]), np.ones([2, 1]))]
    report = check(model, _as_float32, batches)
    assert (report.remaining, report.already_float32) == (["huge", "next"], [])
    tfmp.set_precision(model, "O2", keep_float32=["next"])
    second = check(model, _as_float32, batches)
    assert (second.remaining, second.already_float32) == (["huge"], ["next"])
    policies = {layer.name: layer.now for layer in second.apply(model).layers[1:]}
    assert policies == {"first": "mixed_float16", "huge": "float32", "next": "float32", "last": "mixed_float16"}
    third = check(model, _as_float32, batches)
    assert (third.remaining, third.already_float32, third.far_off) == ([], ["huge", "next"], [])
    assert "In float32 already: huge, next; nothing else must be." in str(third)


@for_every_keras()
def test_layer_that_is_kept_takes_the_layers_within_with_it(keras: ModuleType) -> None:
    seen: list[str] = []

    class Inner(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: tf.Tensor) -> tf.Tensor:
            seen.append(x.dtype.name)
            return x

    class Block(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.inner = Inner(name="inner")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.inner(x) * 1e5

    model = keras.Sequential([keras.Input([1]), _layer_of_ones(keras, name="first"), Block(name="block")])
    seen.clear()
    report = check(model, _as_float32, [(np.ones([1, 1]), np.full([1, 1], 2**-12))])
    assert (report.keep_float32, seen) == (["block"], ["float32"] * 3)


# 2**-90 would need a larger scale than float32 has room for, and with 2**20 no scale is small enough.
@pytest.mark.parametrize(("exponent", "expected"), [(-90, 2**96), (-30, 2**42), (0, 2**12), (12, 1), (20, 1)])
@for_one_keras_of_each_kind
def test_suggested_scale_leaves_three_bits_above_the_largest_gradient(
    keras: ModuleType, exponent: int, expected: float
) -> None:
    model = keras.Sequential([keras.Input([1]), _layer_of_ones(keras, name="only")])
    report = check(model, _as_float32, [(np.ones([1, 1]), np.full([1, 1], 1.5 * 2.0**exponent))])
    assert report.suggested_loss_scale == expected
    assert report["only"].gradients.exponents == (exponent, exponent)
    assert report["only"].far_off == ("its gradients overflow" if exponent == 20 else None)
    assert report["only"].relative_error == (math.inf if exponent == 20 else 0)
    assert report.bfloat16_needs_scaling is False


def _with_a_small_gradient(keras: ModuleType) -> Any:
    inputs = [keras.Input([1]), keras.Input([1])]
    layers = [_layer_of_ones(keras, name=name) for name in ("large", "small")]
    return keras.Model(inputs, [layer(each) for layer, each in zip(layers, inputs, strict=True)])


@pytest.mark.parametrize(
    ("factor", "exponent", "reason"),
    [
        # The gradient for the outputs vanishes, and that for the weight, which is larger, with it.
        (2.0**15, -35, "since even at the scale 50% of its gradients vanish and 0% lose bits"),
        (1.0, -40, "since even at the scale 100% of its gradients vanish and 0% lose bits"),
    ],
)
@for_one_keras_of_each_kind
def test_gradients_that_are_lost_even_at_the_scale_are_far_off(
    keras: ModuleType, factor: float, exponent: int, reason: str
) -> None:
    def loss(labels: Any, outputs: Any) -> Any:
        large, small = (tf.cast(each, tf.float32) for each in outputs)
        return labels * (large * 8 + small * 2.0**exponent)

    model, batch = _with_a_small_gradient(keras), ((np.ones([1, 1]), np.full([1, 1], factor)), np.ones([1, 1]))
    report = check(model, loss, [batch])
    assert (report.suggested_loss_scale, report.far_off) == (2**9, ["small"])
    assert report["small"].far_off is not None
    assert reason in report["small"].far_off
    assert f"small is far off in float16: {report['small'].far_off}." in str(report)
    assert (report["small"].relative_error, math.isnan(report["small"].cosine)) == (1, True)
    assert check(model, loss, [batch], tolerance=1).far_off == []


@for_one_keras_of_each_kind
def test_activations_that_lose_bits_put_a_layer_far_off(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), _layer_of_ones(keras, name="only")])
    # Half way between two numbers of float16, it is rounded by a fifth.
    report = check(model, _as_float32, [(np.full([1, 1], 1.25 * 2.0**-23), np.ones([1, 1]))], tolerance=0.1)
    assert report["only"].relative_error == pytest.approx(0.2)
    assert report["only"].far_off is not None
    assert report["only"].far_off.endswith("since 0% of its activations vanish and 100% lose bits")


@for_one_keras_of_each_kind
def test_everything_is_far_off_at_a_tolerance_below_the_rounding_of_float16(keras: ModuleType) -> None:
    report = check(dense_model(keras), "mse", [data()], tolerance=1e-9)
    assert report.far_off == ["hidden", "o"]
    assert report["o"].far_off is not None
    assert report["o"].far_off.endswith("by the rounding of float16 here or in the layers behind it")


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
    assert sorted(_names(report)) == ["head", "outer/left/same", "outer/right/same", "shared", "sum"]
    assert _names(report)[-2:] == ["sum", "head"]
    assert report["shared"].activations == tfmp.ranges.RangeHistogram.of(*(shared(side(x)) for side in sides))
    assert report["outer/left/same"].activations == tfmp.ranges.RangeHistogram.of(sides[0](x))
    assert report["shared"].weights.total == 4 * 4 + 4
    assert report.keep_float32 == report.far_off == []


def _attending(keras: ModuleType) -> Any:
    class Attending(keras.Model):  # type: ignore[name-defined]
        """Has weights of its own, and layers of every kind that computes in a way of its own."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.embed = keras.layers.Embedding(10, 4, name="embed")
            self.attend = keras.layers.MultiHeadAttention(2, 2, name="attend")
            self.norm = keras.layers.LayerNormalization(name="norm")
            self.lstm = keras.layers.LSTM(3, name="lstm")
            self.head = keras.layers.Dense(1, name="head")
            self.shift = self.add_weight(shape=[1], initializer="ones", name="shift")

        def call(self, ids: tf.Tensor) -> tf.Tensor:
            x = self.embed(ids)
            x = self.norm(x + self.attend(x, x))
            return self.head(self.lstm(x)) + tf.cast(self.shift, self.compute_dtype)

    return Attending(name="net")


@for_every_keras()
@pytest.mark.essential
def test_subclassed_model_is_seen_through_its_layers_and_its_own_weights(keras: ModuleType) -> None:
    model = _attending(keras)
    ids, y = np.arange(40).reshape(8, 5) % 10, data()[1]
    model(ids)
    with_given_weights(model)
    report = check(model, "mse", [(ids, y)])
    assert {"embed", "attend", "norm", "lstm", "head", "net"} <= set(_names(report))
    assert report["embed"].activations == tfmp.ranges.RangeHistogram.of(model.embed(ids))
    assert report["net"].activations == tfmp.ranges.RangeHistogram.of(model(ids))
    assert report["net"].weights == tfmp.ranges.RangeHistogram.of(tf.convert_to_tensor(model.shift))
    expected = gradients(model, lambda: _mse(model(ids, training=True), y))
    found = sum((layer.weight_gradients for layer in report.layers), start=tfmp.ranges.RangeHistogram())
    assert found == tfmp.ranges.RangeHistogram.of(*expected)
    errors = [layer.relative_error for layer in report.layers if layer.relative_error is not None]
    assert (report.keep_float32, report.far_off, 0 < max(errors) < 0.05) == ([], [], True)
    assert report.float16_loss == pytest.approx(report.loss, rel=1e-2)


@for_every_keras()
def test_ranges_are_those_of_the_layers_called_by_hand(keras: ModuleType) -> None:
    model = dense_model(keras)
    (x, y), (hidden, output) = data(), model.layers
    report = check(model, "mse", [(x, y)])
    with tf.GradientTape() as tape:
        between = hidden(x)
        tape.watch(between)
        loss = _mse(output(between), y)
    of_activation = tape.gradient(loss, between)
    of_variables = gradients(model, lambda: _mse(model(x), y))
    histogram = tfmp.ranges.RangeHistogram.of
    assert report["hidden"] == tfmp.ranges.LayerPrecision(
        name="hidden",
        activations=histogram(between),
        largest_activation=float(tf.reduce_max(between)),
        activation_gradients=histogram(of_activation),
        weights=histogram(*map(tf.convert_to_tensor, hidden.trainable_variables)),
        weight_gradients=histogram(*of_variables[:2]),
        cosine=report["hidden"].cosine,
        relative_error=report["hidden"].relative_error,
    )
    assert report["o"].activations == histogram(model(x))
    assert report["o"].weight_gradients == histogram(*of_variables[2:])
    assert report.loss == pytest.approx(float(loss), rel=1e-6)


@for_every_keras()
@pytest.mark.essential
def test_error_of_a_layer_is_that_of_a_model_made_in_mixed_precision(keras: ModuleType) -> None:
    (x, y), model, twin = data(), dense_model(keras), dense_model(keras, "mixed_float16")
    report = check(model, _as_float32, [(x, y)])

    def gradients_of(each: Any, scale: float) -> list[np.ndarray]:
        grads = gradients(each, lambda: tf.reduce_mean(_as_float32(y, each(x))), scale)
        return [grad.numpy().astype(np.float64) / scale for grad in grads]

    exact, rounded = gradients_of(model, 1.0), gradients_of(twin, report.suggested_loss_scale)
    for name, part in (("hidden", slice(0, 2)), ("o", slice(2, 4))):
        one, other = (np.concatenate([grad.ravel() for grad in grads[part]]) for grads in (exact, rounded))
        expected = np.linalg.norm(one - other) / np.linalg.norm(one)
        assert 0 < expected < 1e-2
        assert report[name].relative_error == pytest.approx(expected, rel=1e-9)
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert report[name].cosine == pytest.approx(cosine, rel=1e-12)
    assert report.float16_loss == float(tf.reduce_mean(_as_float32(y, twin(x))))


@for_every_keras()
def test_batch_normalization_uses_the_batch_and_dropout_does_not_act(keras: ModuleType) -> None:
    (x, y), model = data(), stateful_model(keras)
    report = check(model, "mse", [(10 * x + 3, y)])
    hidden, norm, _, output = model.layers
    normalized = norm(hidden(10 * x + 3), training=True)
    assert report["norm"].activations == report["drop"].activations == tfmp.ranges.RangeHistogram.of(normalized)
    assert report["norm"].activations != tfmp.ranges.RangeHistogram.of(norm(hidden(10 * x + 3), training=False))
    assert report.loss == float(_mse(output(normalized), y))


@for_every_keras()
def test_dropout_of_recurrent_and_inner_layers_does_not_act(keras: ModuleType) -> None:
    layers = [
        keras.layers.TimeDistributed(keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)])),
        keras.layers.GRU(3, dropout=0.5, recurrent_dropout=0.5),
        keras.layers.GaussianNoise(1.0),
        keras.layers.Dense(1),
    ]
    model = with_given_weights(keras.Sequential([keras.Input([5, 4]), *layers]))
    x, y = np.random.default_rng(0).normal(size=[8, 5, 4]).astype(np.float32), data()[1]
    report = check(model, "mse", [(x, y)])
    assert report.loss == pytest.approx(float(_mse(model(x), y)), rel=1e-6)
    assert report.far_off == []


@for_every_keras()
def test_masks_reach_the_layers(keras: ModuleType) -> None:
    layers = [
        keras.layers.Embedding(10, 4, mask_zero=True),
        keras.layers.Bidirectional(keras.layers.LSTM(3)),
        keras.layers.Dense(1),
    ]
    model = with_given_weights(keras.Sequential([keras.Input([5], dtype="int32"), *layers]))
    ids, y = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]] * 4), data()[1]
    report = check(model, "mse", [(ids, y)])
    assert report.loss == pytest.approx(float(_mse(model(ids), y)), rel=1e-6)


@for_one_keras_of_each_kind
def test_output_that_the_loss_ignores_has_no_gradients(keras: ModuleType) -> None:
    inputs = keras.Input([4])
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("used", "unused")]
    model = with_given_weights(keras.Model(inputs, outputs))
    x, y = data()
    report = check(model, lambda labels, outputs: (outputs[0] - tf.cast(labels, outputs[0].dtype)) ** 2, [(x, y)])
    unused = report["unused"]
    assert (unused.activations.total, unused.weights.total, unused.gradients.total) == (8, 5, 0)
    assert (unused.relative_error, unused.cosine, unused.far_off) == (None, None, None)


def _recording(keras: ModuleType, seen: dict[str, list[str]]) -> type:
    class Recording(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: tf.Tensor) -> tf.Tensor:
            seen.setdefault(self.name, []).append(x.dtype.name)
            return x

    return Recording


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


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@for_every_keras()
def test_layers_that_the_user_keeps_in_float32_stay_so(keras: ModuleType, policy: str) -> None:
    seen: dict[str, list[str]] = {}
    recording = _recording(keras, seen)
    layers = [keras.layers.Dense(4, dtype=policy), recording(dtype=policy, name="half")]
    layers += [recording(dtype="float32", name="full"), keras.layers.Dense(1, dtype="float32")]
    model = with_given_weights(keras.Sequential([keras.Input([4]), *layers]))
    seen.clear()
    report = check(model, "mse", [data()])
    assert seen == {"half": ["float32", "float32", "float16"], "full": ["float32"] * 3}
    assert report.float16_loss != report.loss


@for_one_keras_of_each_kind
def test_model_that_is_all_float32_runs_in_float16_as_a_whole(keras: ModuleType) -> None:
    seen: dict[str, list[str]] = {}
    recording = _recording(keras, seen)
    layers = [keras.layers.Dense(4), recording(name="one"), recording(name="two"), keras.layers.Dense(1)]
    model = with_given_weights(keras.Sequential([keras.Input([4]), *layers]))
    seen.clear()
    check(model, "mse", [data()])
    assert seen == {name: ["float32", "float32", "float16"] for name in ("one", "two")}


@for_one_keras_of_each_kind
def test_generator_gives_no_more_batches_than_are_taken(keras: ModuleType) -> None:
    given = (data(seed) for seed in range(4))
    model = dense_model(keras)
    report = check(model, "mse", given, num_batches=2)
    assert (report.batches, report["o"].activations.total) == (2, 2 * 8)
    np.testing.assert_array_equal(next(given)[0], data(2)[0])
    assert check(model, "mse", given).batches == 1


@for_one_keras_of_each_kind
def test_batches_of_lists_and_datasets_are_the_same(keras: ModuleType) -> None:
    model, batches = dense_model(keras), [data(seed) for seed in range(2)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    reports = [check(model, "mse", each, num_batches=2) for each in (batches, dataset, dataset.repeat())]
    assert [report.to_json() for report in reports] == [reports[0].to_json()] * 3
    losses = [check(model, "mse", [batch]).loss for batch in batches]
    assert reports[0].loss == sum(losses) / 2
    summed = sum(
        (check(model, "mse", [batch])["o"].activations for batch in batches), start=tfmp.ranges.RangeHistogram()
    )
    assert reports[0]["o"].activations == summed
    assert reports[0]["o"].weights.total == 5


@for_one_keras_of_each_kind
def test_eight_batches_are_enough(keras: ModuleType) -> None:
    dataset = tf.data.Dataset.from_tensors(data()).repeat()
    assert check(dense_model(keras), "mse", dataset).batches == 8


@for_one_keras_of_each_kind
def test_inputs_and_outputs_may_be_nests(keras: ModuleType) -> None:
    inputs = {name: keras.Input([4], name=name) for name in ("one", "two")}
    both = keras.layers.Concatenate(name="both")(list(inputs.values()))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name + "_out")(both) for name in ("a", "b")})
    with_given_weights(model).compile(
        "sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 2.0}, run_eagerly=True
    )
    (x, y), (other, label) = data(), data(1)
    batch = ({"one": x, "two": other}, {"a": y, "b": label})
    expected = model.evaluate(*batch, verbose=0, return_dict=True)["loss"]
    assert check(model, None, [batch]).loss == pytest.approx(expected, rel=1e-6)
    model.train_on_batch(*batch)
