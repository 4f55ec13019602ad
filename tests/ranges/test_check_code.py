"""check_precision for raw TensorFlow: functions of eager code, and the losses of TF1 graphs."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import check, counted, names

import tfmp

tf1 = tf.compat.v1
_NOTHING = tfmp.ranges.RangeHistogram()

#: Takes the variables by name, a batch and a type; returns the loss.
Loss = Callable[[Mapping[str, tf.Tensor], tf.Tensor, tf.DType], tf.Tensor]


def _report(
    way: str,
    loss: Loss,
    values: Mapping[str, Any],
    *batches: Any,
    half: bool = False,
    only: Sequence[str] | None = None,
) -> tfmp.ranges.PrecisionReport:
    batches = tuple(np.asarray(each, np.asarray(each).dtype.str.replace("f8", "f4")) for each in batches)
    if way == "function":
        variables = {name: tf.Variable(value, dtype=tf.float32, name=name) for name, value in values.items()}
        return check(
            lambda batch: loss(variables, batch, tf.float32),
            None,
            [tf.constant(batch) for batch in batches],
            in_float16=(lambda batch: loss(variables, batch, tf.float16)) if half else None,
            variables=None if only is None else [variables[name] for name in only],
        )
    with tf.Graph().as_default(), tf1.Session() as session:
        variables = {
            name: tf1.get_variable(name, initializer=tf.constant(value, tf.float32)) for name, value in values.items()
        }
        batch = tf1.placeholder(batches[0].dtype, batches[0].shape)
        in_float32 = loss(variables, batch, tf.float32)
        in_float16 = loss(variables, batch, tf.float16) if half else None
        session.run(tf1.global_variables_initializer())
        before, feeds = session.run(variables), [{batch: each} for each in batches]
        given = None if only is None else [variables[name] for name in only]
        found = [check(in_float32, None, feeds, in_float16=in_float16, variables=given) for _ in range(2)]
        # Two checks find the same, and change nothing.
        assert found[0].to_json() == found[1].to_json()
        assert str(session.run(variables)) == str(before)
        assert len(tf1.global_variables()) == len(values)
        return found[0]


_WAYS = pytest.mark.parametrize("way", ["function", pytest.param("graph", marks=pytest.mark.graph)])
_NET = {"kernel": [[0.5, -1.0], [2.0, 0.25]], "scale": [3.0, -0.5]}
_X = np.float32([[1.0, 2.0], [-3.0, 0.5]]) / 3


def _net(v: Mapping[str, tf.Tensor], x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    hidden = tfmp.ranges.probe(tf.matmul(tf.cast(x, dtype), tf.cast(v["kernel"], dtype)), "hidden")
    output = tfmp.ranges.probe(tf.nn.relu(hidden) * tf.cast(v["scale"], dtype), "output")
    return (tf.cast(output, tf.float32) - 1.0) ** 2


def _of_net(dtype: Any, scale: float = 1.0) -> tuple[float, list[Any], list[Any]]:
    """Return the loss, the values that are looked at, and their gradients, as a session of TensorFlow has them."""
    with tf.Graph().as_default(), tf1.Session() as session:
        kernel, factors = (tf.constant(value, tf.float32) for value in _NET.values())
        hidden = tf.matmul(tf.cast(_X, dtype), tf.cast(kernel, dtype))
        output = tf.nn.relu(hidden) * tf.cast(factors, dtype)
        loss = tf.reduce_mean((tf.cast(output, tf.float32) - 1.0) ** 2)
        looked_at = [hidden, output, kernel, factors]
        return session.run((loss, looked_at, tf.gradients(loss * scale, looked_at)))


@_WAYS
def test_probes_come_before_the_variables_and_have_the_ranges_of_a_tape(way: str) -> None:
    report = _report(way, _net, _NET, _X)
    loss, values, grads = _of_net(tf.float32)
    expected = [
        tfmp.ranges.LayerPrecision(
            name=name,
            activations=counted(value) if is_probe else _NOTHING,
            largest_activation=float(np.abs(value).max()) if is_probe else 0.0,
            activation_gradients=counted(grad) if is_probe else _NOTHING,
            weights=_NOTHING if is_probe else counted(value),
            weight_gradients=_NOTHING if is_probe else counted(grad),
        )
        for name, value, grad in zip(("hidden", "output", "kernel", "scale"), values, grads, strict=True)
        for is_probe in [name in {"hidden", "output"}]
    ]
    assert (report.layers, report.batches) == (expected, 1)
    assert report.loss == pytest.approx(loss, rel=1e-6)
    # Without in_float16 nothing is compared.
    assert (report.float16_loss, report.far_off, report.keep_float32) == (None, [], [])
    assert "The model was not run in float16: pass in_float16 to compare its gradients." in str(report)


@_WAYS
def test_in_float16_is_compared_at_the_suggested_scale(way: str) -> None:
    report = _report(way, _net, _NET, _X, half=True)
    scale = report.suggested_loss_scale
    _, _, exact = _of_net(tf.float32)
    loss, _, rounded = _of_net(tf.float16, scale)
    for name, one, other in zip(_NET, exact[2:], rounded[2:], strict=True):
        difference = np.float64(one) - np.float64(other) / scale
        expected = np.linalg.norm(difference) / np.linalg.norm(np.float64(one))
        assert report[name].relative_error == pytest.approx(expected, rel=1e-6)
        assert 0 < expected < 1e-2
    assert report["hidden"].relative_error is None
    assert report.float16_loss == pytest.approx(loss, rel=1e-6)
    assert report.float16_loss != report.loss
    assert "The model was not run in float16" not in str(report)


@_WAYS
def test_only_given_variables_are_looked_at_and_those_without_influence_have_no_gradients(way: str) -> None:
    report = _report(way, _net, {**_NET, "unused": 1.0}, _X, half=True, only=["scale", "unused"])
    assert names(report) == ["hidden", "output", "scale", "unused"]
    found = report["unused"]
    assert (found.weights.total, found.weight_gradients.total, found.relative_error) == (1, 0, None)


@_WAYS
def test_probes_of_one_name_are_counted_together_and_those_beside_the_loss_only_in_eager_code(way: str) -> None:
    def loss(v: Mapping[str, tf.Tensor], x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        tfmp.ranges.probe(x * 7.0, "beside")
        for _ in range(3):
            x = tfmp.ranges.probe(x * v["w"], "power")
        return x

    report = _report(way, loss, {"w": 2.0}, 1.0)
    assert names(report) == ["beside"] * (way == "function") + ["power", "w"]
    assert report["power"].activations == counted([2, 4, 8])
    assert report["power"].activation_gradients == counted([4, 2, 1])


@_WAYS
def test_large_probe_is_named_although_it_cannot_be_kept_in_float32(way: str) -> None:
    def loss(v: Mapping[str, tf.Tensor], x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tfmp.ranges.probe(tf.cast(v["w"], dtype) * tf.cast(x, dtype), "huge")

    report = _report(way, loss, {"w": 1.0}, 1e5, half=True)
    assert (report.keep_float32, report.far_off) == (["huge"], ["w"])
    assert report["huge"].keep_float32 == "its activations reach 1e+05, and float16 ends at 65504"
    assert report["w"].far_off == "its gradients overflow"
    assert (report.float16_loss, report.to_dict()["float16_loss"]) == (np.inf, "inf")


@_WAYS
def test_gradients_of_rows_are_counted_and_compared(way: str) -> None:
    def loss(v: Mapping[str, tf.Tensor], rows: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        table = tf.cast(v["table"], dtype) if dtype == tf.float16 else v["table"]
        return tf.reduce_sum(tf.gather(table, rows))

    report = _report(way, loss, {"table": np.ones([5, 2])}, np.int32([1, 1, 3]), half=True)
    assert report["table"].weight_gradients == counted(np.ones([3, 2]))
    assert (report["table"].relative_error, report["table"].cosine) == (0, pytest.approx(1))


def _report_of_gradients(
    way: str, in_float32: Sequence[float], in_float16: Sequence[float] | None = None, *others: Any
) -> tfmp.ranges.PrecisionReport:
    """Check a loss with these gradients for its variable; `others` are the pairs of further batches."""

    def loss(v: Mapping[str, tf.Tensor], grads: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.reduce_sum(v["w"] * grads[int(dtype == tf.float16)])

    pairs = [(in_float32, in_float32 if in_float16 is None else in_float16), *others]
    return _report(way, loss, {"w": np.ones(len(in_float32))}, *pairs, half=in_float16 is not None)


@pytest.mark.parametrize(
    ("exponent", "way"),
    [
        *((exponent, "function") for exponent in (-126, -85, -84, -83, -20, -1, 0, 1, 11, 12, 13, 100)),
        *(pytest.param(exponent, "graph", marks=pytest.mark.graph) for exponent in (-126, 0, 13)),
    ],
)
def test_scale_puts_the_largest_gradient_three_bits_below_overflow(way: str, exponent: int) -> None:
    found = _report_of_gradients(way, [1.5 * 2.0**exponent, -1.25 * 2.0**-126, 0.0])
    scale, gradients = found.suggested_loss_scale, found["w"].weight_gradients
    # It is neither below 1 nor too large for the scaled loss.
    assert scale == 2.0 ** min(max(12 - exponent, 0), 96)
    if 1 < scale < 2.0**96:
        # Three bits: eight times as large is still a number of float16, and 16 times as large is not.
        assert gradients.shares(scale=8 * scale).overflow == 0
        assert gradients.shares(scale=16 * scale).overflow > 0


@pytest.mark.parametrize(
    ("fine", "small", "exponent", "zeros", "expected"),
    [
        (999, 1, -127, 0, False),
        (998, 2, -127, 0, True),
        (998, 2, -140, 0, True),
        (1000, 1000, -126, 0, False),
        # Zeros are no loss, and do not dilute what is lost.
        (998, 2, -130, 10**5, True),
        (5, 0, 0, 5, False),
    ],
)
def test_bfloat16_needs_scaling_if_more_than_one_gradient_in_a_thousand_is_lost(
    fine: int, small: int, exponent: int, zeros: int, expected: bool
) -> None:
    # Processors may replace products with subnormal numbers by 0, so the small ones are gradients by themselves.
    grads = np.concatenate([np.ones(fine), np.full(small, 2.0**exponent), np.zeros(zeros)]).astype(np.float32)

    @tf.custom_gradient
    def loss(w: tf.Tensor) -> Any:
        return tf.reduce_sum(w), lambda upstream: tf.constant(grads)

    w = tf.Variable(tf.ones(grads.shape), name="w")
    assert check(lambda _: loss(w), None, [None]).bfloat16_needs_scaling is expected


@pytest.mark.parametrize(
    "batches",
    [
        [([3.0, 4.0], [3.0, 4.0])],
        [([3.0, 4.0], [3.0, 6.0])],
        [([3.0, 4.0], [-3.0, -4.0])],
        [([2.0, 0.0], [0.0, 2.0])],
        [([3.0, 4.0], [6.0, 8.0])],
        # Batches are parts of one vector, and those of opposite sign do not cancel.
        [([3.0, 0.0], [3.0, 1.0]), ([4.0, 0.0], [4.0, 2.0])],
        [([1.0, 1.0], [1.0, 0.5]), ([-1.0, -1.0], [-1.0, -0.5])],
        # What vanishes has no direction.
        [([1.0, 2.0], [0.0, 0.0])],
        # What overflows in one batch is infinitely far off.
        *([([1.0, 2.0], [1.0, value]), ([1.0, 2.0], [1.0, 2.0])] for value in (math.inf, -math.inf, math.nan)),
    ],
)
@_WAYS
def test_error_is_relative_to_the_norm_in_float32(way: str, batches: list[tuple[list[float], list[float]]]) -> None:
    found = _report_of_gradients(way, *batches[0], *batches[1:])["w"]
    one, other = (np.concatenate(part) for part in zip(*batches, strict=True))
    finite = np.isfinite(other).all()
    error = np.linalg.norm(one - other) / np.linalg.norm(one) if finite else math.inf
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other) if finite and other.any() else math.nan
    assert (found.cosine, found.relative_error) == pytest.approx((cosine, error), nan_ok=True, abs=1e-12)
    assert (found.far_off is None) == (error <= 0.3)


@_WAYS
def test_gradients_whose_terms_cancel_are_far_off_by_the_rounding_of_the_terms(way: str) -> None:
    def loss(v: Mapping[str, tf.Tensor], x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        if dtype == tf.float32:
            return x * (v["w"] + 1.0)
        return tf.cast(tf.cast(x * [1.0, 1.25], dtype) * tf.cast(v["w"] + 1.0, dtype), tf.float32)

    # In float32 the gradient is the sum of 1 + 2**-12 and -1; in float16 the first is rounded to 1.
    report = _report(way, loss, {"w": 2.0**-20}, [1 + 2.0**-12, -1 + 2.0**-9], half=True)
    assert "they are sums whose terms cancel" in str(report["w"].far_off)


@_WAYS
def test_scale_is_halved_until_gradients_do_not_overflow_in_float16(way: str) -> None:
    @tf.custom_gradient
    def overflowing_above_2_13(x: tf.Tensor) -> Any:
        # A backward pass whose intermediate result is 32 times its own.
        return tf.identity(x), lambda upstream: upstream * 32.0 / 32.0

    def loss(v: Mapping[str, tf.Tensor], x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(overflowing_above_2_13(tf.cast(x, dtype) * tf.cast(v["w"], dtype)), tf.float32)

    report = _report(way, loss, {"w": 1.0}, 1.0, half=True)
    # 2**12 * 2**5 is infinite in float16, and 2**10 * 2**5 is not.
    assert (report.suggested_loss_scale, report.far_off) == (2**10, [])


def test_loss_is_that_of_the_function_or_of_loss_fn_with_weights_of_examples() -> None:
    w = tf.Variable(2.0, name="w")
    report = check(lambda batch: w * batch["x"] * batch["by"], None, [{"x": tf.constant([1.0, 3.0]), "by": 4.0}])
    # The mean of a loss of any shape is taken.
    assert (report.loss, report.suggested_loss_scale) == (16, 2**9)
    batch = (tf.ones([2]), tf.zeros([2]), tf.constant([1.0, 3.0]))
    for given, loss in ((batch, 8), (batch[:2], 4)):
        assert check(lambda x: x * w, lambda y, outputs: (outputs - y) ** 2, [given]).loss == loss


@pytest.mark.parametrize("traced_before", [True, False])
def test_traced_function_is_checked_through_its_variables(traced_before: bool) -> None:
    w = tf.Variable(2.0, name="w")

    @tf.function
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tfmp.ranges.probe(x * w, "within")

    if traced_before:
        loss(tf.constant(3.0))
    report = check(loss, None, [tf.constant(3.0)])
    assert names(report) == ["w"]
    assert report["w"].weight_gradients == counted(3.0)


def test_probe_in_another_thread_is_not_seen() -> None:
    w = tf.Variable(2.0, name="w")

    def loss(x: tf.Tensor) -> tf.Tensor:
        thread = threading.Thread(target=lambda: tfmp.ranges.probe(x, "other"))
        thread.start()
        thread.join()
        return tfmp.ranges.probe(x * w, "own")

    assert names(check(loss, None, [tf.ones([])])) == ["own", "w"]


def test_variables_of_one_name_are_told_apart() -> None:
    one, two = (tf.Variable(value, name="kernel") for value in (2.0, 4.0))
    report = check(lambda x: x * one + two, None, [tf.ones([])])
    assert [(layer.name, layer.weights.exponents) for layer in report.layers] == [
        ("kernel", (1, 1)),
        ("kernel (2)", (2, 2)),
    ]


@pytest.mark.graph
def test_graph_may_read_its_own_input(session: tf1.Session) -> None:
    count = tf1.get_variable("count", [], initializer=tf1.zeros_initializer(), trainable=False)
    v = tf1.get_variable("v", [], initializer=tf1.ones_initializer())
    with tf.control_dependencies([tf1.assign_add(count, 1.0)]):
        loss = v * 2.0
    session.run(tf1.global_variables_initializer())
    report = check(loss, None, [None] * 3)
    assert (report.batches, session.run(count)) == (3, 3)
    assert check(loss, None, iter([None] * 9), num_batches=2).batches == 2


@pytest.mark.graph
def test_half_of_a_graph_may_share_stored_variables(session: tf1.Session) -> None:
    def loss(dtype: tf.DType) -> tf.Tensor:
        getter = tfmp.float32_variable_storage_getter
        with tf1.variable_scope("net", dtype=dtype, custom_getter=getter, reuse=tf1.AUTO_REUSE):
            kernel = tf1.get_variable("kernel", [2], dtype, initializer=tf1.constant_initializer([0.3, -1.1]))
        return tf.cast(kernel, tf.float32) ** 2

    in_float32, in_float16 = loss(tf.float32), loss(tf.float16)
    session.run(tf1.global_variables_initializer())
    report = check(in_float32, None, [{}], in_float16=in_float16)
    assert names(report) == ["net/kernel"]
    assert 0 < report["net/kernel"].relative_error < 1e-2


@pytest.mark.graph
def test_passed_session_goes_before_the_default_one_and_is_enough_outside_of_the_graph() -> None:
    with tf.Graph().as_default() as graph:
        v = tf1.get_variable("v", [], initializer=tf1.ones_initializer())
        loss = v * 3.0
        initial, assign = v.initializer, tf1.assign(v, 5.0)
    with tf1.Session(graph=graph) as session, tf1.Session(graph=graph) as other:
        session.run(initial)
        other.run(assign)
        assert (check(loss, None, [None], session=session).loss, check(loss, None, [None]).loss) == (3, 15)
    session = tf1.Session(graph=graph)
    session.run(initial)
    assert check(loss, None, [None], session=session).loss == 3
    session.close()
