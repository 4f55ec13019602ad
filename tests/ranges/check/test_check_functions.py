"""check_precision for functions of raw TensorFlow, in eager code."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp


class _Net:
    """A net of two variables, in float32 and in float16."""

    def __init__(self) -> None:
        self.kernel = tf.Variable([[0.5, -1.0], [2.0, 0.25]], name="kernel")
        self.scale = tf.Variable([3.0, -0.5], name="scale")

    def __call__(self, x: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
        kernel, scale = (tf.cast(variable, dtype) for variable in (self.kernel, self.scale))
        hidden = tfmp.ranges.probe(tf.matmul(tf.cast(x, dtype), kernel), "hidden")
        return tfmp.ranges.probe(tf.nn.relu(hidden) * scale, "output")

    def in_float16(self, x: tf.Tensor) -> tf.Tensor:
        return self(x, tf.float16)


_X = tf.constant([[1.0, 2.0], [-3.0, 0.5]])
_Y = tf.constant([[1.0, 0.0], [0.0, 2.0]])


def _loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return (tf.cast(outputs, tf.float32) - labels) ** 2


def _check(*args: Any, **settings: Any) -> tfmp.ranges.PrecisionReport:
    return tfmp.check_precision(*args, **{"progress": False} | settings)


def test_probes_come_before_the_variables_and_have_the_ranges_of_a_tape() -> None:
    net = _Net()
    report = _check(net, _loss, [(_X, _Y)])
    with tf.GradientTape() as tape:
        hidden = tf.matmul(_X, net.kernel)
        tape.watch(hidden)
        output = tf.nn.relu(hidden) * net.scale
        tape.watch(output)
        loss = tf.reduce_mean(_loss(_Y, output))
    grads = tape.gradient(loss, [hidden, output, net.kernel, net.scale])
    histogram, nothing = tfmp.ranges.RangeHistogram.of, tfmp.ranges.RangeHistogram()
    assert report.layers == [
        tfmp.ranges.LayerPrecision(
            name="hidden",
            activations=histogram(hidden),
            largest_activation=6.5 - 2,
            activation_gradients=histogram(grads[0]),
            weights=nothing,
            weight_gradients=nothing,
        ),
        tfmp.ranges.LayerPrecision(
            name="output",
            activations=histogram(output),
            largest_activation=13.5,
            activation_gradients=histogram(grads[1]),
            weights=nothing,
            weight_gradients=nothing,
        ),
        tfmp.ranges.LayerPrecision(
            name="kernel",
            activations=nothing,
            largest_activation=0.0,
            activation_gradients=nothing,
            weights=histogram(net.kernel),
            weight_gradients=histogram(grads[2]),
        ),
        tfmp.ranges.LayerPrecision(
            name="scale",
            activations=nothing,
            largest_activation=0.0,
            activation_gradients=nothing,
            weights=histogram(net.scale),
            weight_gradients=histogram(grads[3]),
        ),
    ]
    assert (report.loss, report.batches) == (float(loss), 1)


def test_without_in_float16_nothing_is_compared_and_the_report_says_so() -> None:
    report = _check(_Net(), _loss, [(_X, _Y)])
    assert (report.float16_loss, report.far_off, report.keep_float32) == (None, [], [])
    assert {(layer.cosine, layer.relative_error) for layer in report.layers} == {(None, None)}
    assert "The model was not run in float16: pass in_float16 to compare its gradients." in str(report)


def test_in_float16_is_compared_at_the_suggested_scale() -> None:
    net, scales = _Net(), []

    @tf.custom_gradient
    def looking(x: tf.Tensor) -> Any:
        def gradient(grad: tf.Tensor) -> tf.Tensor:
            scales.append(float(grad))
            return grad

        return tf.identity(x), gradient

    def loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return looking(tf.reduce_mean(_loss(labels, outputs)))

    x = _X / 3
    report = _check(net, loss, [(x, _Y)], in_float16=net.in_float16)
    assert scales == [1, 1, report.suggested_loss_scale]
    variables = [net.kernel, net.scale]

    def gradients(dtype: tf.DType, scale: float) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            scaled = tf.reduce_mean(_loss(_Y, net(x, dtype))) * scale
        return [grad.numpy().astype(np.float64) / scale for grad in tape.gradient(scaled, variables)]

    exact, rounded = gradients(tf.float32, 1.0), gradients(tf.float16, report.suggested_loss_scale)
    for name, one, other in zip(("kernel", "scale"), exact, rounded, strict=True):
        expected = np.linalg.norm(one - other) / np.linalg.norm(one)
        assert report[name].relative_error == pytest.approx(expected, rel=1e-9)
        assert 0 < expected < 1e-2
    assert report["hidden"].relative_error is None
    assert report.float16_loss == float(tf.reduce_mean(_loss(_Y, net.in_float16(x))))
    assert "The model was not run in float16" not in str(report)


def test_without_loss_fn_the_function_takes_the_batch_and_returns_the_loss() -> None:
    w = tf.Variable(2.0, name="w")

    def loss(batch: dict[str, Any]) -> tf.Tensor:
        return tfmp.ranges.probe(w * batch["x"], "wx") * batch["by"]

    report = _check(loss, None, [{"x": tf.constant([1.0, 3.0]), "by": 4.0}])
    # The mean of a loss of any shape is taken.
    assert (report.loss, report.suggested_loss_scale) == (16, 2**9)
    assert report["w"].weight_gradients == tfmp.ranges.RangeHistogram.of(tf.constant(8.0))
    assert report["wx"].activation_gradients == tfmp.ranges.RangeHistogram.of(tf.constant([2.0, 2.0]))


def test_only_given_variables_are_looked_at() -> None:
    net = _Net()
    report = _check(net, _loss, [(_X, _Y)], variables=[net.scale])
    assert [layer.name for layer in report.layers] == ["hidden", "output", "scale"]


def test_variable_that_the_loss_does_not_depend_on_has_no_gradients() -> None:
    net, unused = _Net(), tf.Variable(1.0, name="unused")
    report = _check(net, _loss, [(_X, _Y)], variables=[net.scale, unused], in_float16=net.in_float16)
    found = report["unused"]
    assert (found.weights.total, found.weight_gradients.total, found.relative_error) == (1, 0, None)


def test_probes_of_one_name_are_counted_together() -> None:
    w = tf.Variable(2.0, name="w")

    def loss(x: tf.Tensor) -> tf.Tensor:
        for _ in range(3):
            x = tfmp.ranges.probe(x * w, "power")
        return x

    report = _check(loss, None, [tf.constant(1.0)])
    assert report["power"].activations == tfmp.ranges.RangeHistogram.of(tf.constant([2.0, 4.0, 8.0]))
    assert report["power"].activation_gradients == tfmp.ranges.RangeHistogram.of(tf.constant([4.0, 2.0, 1.0]))


def test_large_probe_is_named_although_it_cannot_be_kept_in_float32() -> None:
    w = tf.Variable(1.0, name="w")

    def loss(x: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
        return tfmp.ranges.probe(tf.cast(w, dtype) * tf.cast(x, dtype), "huge")

    batch = tf.constant(1e5)
    report = _check(loss, None, [batch], in_float16=lambda x: loss(x, tf.float16))
    assert (report.keep_float32, report.far_off) == (["huge"], ["w"])
    assert report["huge"].keep_float32 == "its activations reach 1e+05, and float16 ends at 65504"
    assert report["w"].far_off == "its gradients overflow"
    assert (report.float16_loss, report.to_dict()["float16_loss"]) == (np.inf, "inf")


def test_gradients_of_rows_are_counted_and_compared() -> None:
    table = tf.Variable(tf.ones([5, 2]), name="table")

    def loss(rows: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
        return tf.reduce_sum(tf.gather(tf.cast(table, dtype) if dtype == tf.float16 else table, rows))

    report = _check(loss, None, [tf.constant([1, 1, 3])], in_float16=lambda rows: loss(rows, tf.float16))
    assert report["table"].weight_gradients == tfmp.ranges.RangeHistogram.of(tf.ones([3, 2]))
    assert (report["table"].relative_error, report["table"].cosine) == (0, pytest.approx(1))


def test_function_traced_before_is_checked_through_its_variables() -> None:
    w = tf.Variable(2.0, name="w")

    @tf.function
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tfmp.ranges.probe(x * w, "within")

    loss(tf.constant(3.0))
    report = _check(loss, None, [tf.constant(3.0)])
    assert [layer.name for layer in report.layers] == ["w"]
    assert report["w"].weight_gradients == tfmp.ranges.RangeHistogram.of(tf.constant(3.0))


def test_next_random_numbers_and_variables_are_those_without_a_check() -> None:
    net = _Net()

    def noisy(x: tf.Tensor) -> tf.Tensor:
        return net(x) + tf.random.normal([2])

    def numbers(checks: int) -> list[Any]:
        tf.random.set_seed(3)
        first = tf.random.normal([2])
        for _ in range(checks):
            _check(noisy, _loss, [(_X, _Y)])
        return [first.numpy().tolist(), tf.random.normal([2]).numpy().tolist()]

    before = [variable.numpy().tolist() for variable in (net.kernel, net.scale)]
    assert numbers(0) == numbers(1) == numbers(2)
    assert [variable.numpy().tolist() for variable in (net.kernel, net.scale)] == before


def test_function_traced_during_the_check() -> None:
    w = tf.Variable(2.0, name="w")

    @tf.function
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tfmp.ranges.probe(x * w, "within")

    assert "w" in [layer.name for layer in tfmp.check_precision(loss, None, [tf.constant(3.0)], progress=False).layers]


def test_weights_of_examples_for_functions() -> None:
    w = tf.Variable(2.0)
    batch = (tf.ones([2]), tf.zeros([2]), tf.constant([1.0, 3.0]))
    assert tfmp.check_precision(lambda x: x * w, lambda y, out: (out - y) ** 2, [batch], progress=False).loss == 8


def test_gradients_whose_terms_cancel_are_far_off_by_the_rounding_of_the_terms() -> None:
    w = tf.Variable(2.0**-20, name="w")

    def in_float16(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(x, tf.float16) * tf.cast(w + 1.0, tf.float16), tf.float32)

    # In float32 the gradient is the sum of 1 + 2**-12 and -1; in float16 the first is rounded to 1.
    x = tf.constant([1 + 2.0**-12, -1 + 2.0**-9])
    report = tfmp.check_precision(
        lambda x: x * (w + 1.0), None, [x], in_float16=lambda x: in_float16(x * [1.0, 1.25]), progress=False
    )
    assert report["w"].far_off is not None
    assert "they are sums whose terms cancel" in report["w"].far_off


def test_variables_of_one_name_are_told_apart() -> None:
    one, two = (tf.Variable(value, name="kernel") for value in (2.0, 4.0))
    report = tfmp.check_precision(lambda x: x * one + two, None, [tf.ones([])], progress=False)
    assert [(layer.name, layer.weights.exponents) for layer in report.layers] == [
        ("kernel", (1, 1)),
        ("kernel (2)", (2, 2)),
    ]


def test_scale_is_halved_until_gradients_do_not_overflow_in_float16() -> None:
    w = tf.Variable(1.0, name="w")

    @tf.custom_gradient
    def overflowing_above_2_13(x: tf.Tensor) -> Any:
        # A backward pass whose intermediate result is 32 times its own.
        return tf.identity(x), lambda upstream: upstream * 32.0 / 32.0

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(overflowing_above_2_13(x * tf.cast(w, x.dtype)), tf.float32)

    report = tfmp.check_precision(
        loss, None, [tf.ones([])], in_float16=lambda x: loss(tf.cast(x, tf.float16)), progress=False
    )
    # 2**12 * 2**5 is infinite in float16, and 2**10 * 2**5 is not.
    assert (report.suggested_loss_scale, report.far_off) == (2**10, [])
