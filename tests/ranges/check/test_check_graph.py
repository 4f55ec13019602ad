"""check_precision for the loss of a TF1 graph."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = pytest.mark.graph

_X = np.float32([[1.0, 3.0], [-3.0, 0.5]]) / 3
_Y = np.float32([[0.9], [2.1]])


def _check(*args: Any, **settings: Any) -> tfmp.ranges.PrecisionReport:
    return tfmp.check_precision(*args, **{"progress": False} | settings)


def _variable(name: str, value: Any) -> tf.Variable:
    return tf.compat.v1.get_variable(name, initializer=tf.constant(value, tf.float32))


def _loss(x: tf.Tensor, y: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Build the same loss in any type, of variables in float32."""
    getter = tfmp.float32_variable_storage_getter
    with tf.compat.v1.variable_scope("net", dtype=dtype, custom_getter=getter, reuse=tf.compat.v1.AUTO_REUSE):
        initializer = tf.compat.v1.constant_initializer([0.5, -1.0])
        kernel = tf.compat.v1.get_variable("kernel", [2, 1], dtype, initializer=initializer)
        bias = tf.compat.v1.get_variable("bias", [1], dtype, initializer=tf.compat.v1.ones_initializer())
    output = tfmp.ranges.probe(tf.matmul(tf.cast(x, dtype), kernel) + bias, "output")
    return (tf.cast(output, tf.float32) - y) ** 2


def _placeholders() -> list[tf.Tensor]:
    return [tf.compat.v1.placeholder(tf.float32, each.shape) for each in (_X, _Y)]


def test_loss_is_fed_and_its_probes_and_variables_are_looked_at(session: tf.compat.v1.Session) -> None:
    x, y = _placeholders()
    loss = _loss(x, y)
    session.run(tf.compat.v1.global_variables_initializer())
    report = _check(loss, None, [{x: _X, y: _Y}])
    output = _X @ [[0.5], [-1.0]] + 1
    of_output = output - _Y
    assert [layer.name for layer in report.layers] == ["output", "net/kernel", "net/bias"]
    assert report.loss == pytest.approx(float(np.mean((output - _Y) ** 2)), rel=1e-6)
    assert report["output"].largest_activation == pytest.approx(float(np.abs(output).max()), rel=1e-6)
    assert report["output"].activations.exponents == _exponents(output)
    assert report["output"].activation_gradients.exponents == _exponents(of_output)
    assert report["net/kernel"].weight_gradients.exponents == _exponents(_X.T @ of_output)
    assert report["net/bias"].weight_gradients.exponents == _exponents(of_output.sum())
    assert report["net/kernel"].weights.to_dict() == {"-1": 1, "0": 1}
    assert (report.float16_loss, report["net/kernel"].relative_error) == (None, None)
    assert "The model was not run in float16: pass in_float16 to compare its gradients." in str(report)


def _exponents(values: Any) -> tuple[int, int]:
    exponents = np.floor(np.log2(np.abs(values)))
    return int(exponents.min()), int(exponents.max())


def test_loss_in_float16_of_the_same_variables_is_compared(session: tf.compat.v1.Session) -> None:
    x, y = _placeholders()
    loss, half = _loss(x, y), _loss(x, y, tf.float16)
    scale = tf.compat.v1.placeholder(tf.float32, [])
    variables = tf.compat.v1.trainable_variables()
    by_hand = [tf.gradients(tf.reduce_mean(each) * scale, variables) for each in (loss, half)]
    session.run(tf.compat.v1.global_variables_initializer())
    feeds = {x: _X, y: _Y}
    report = _check(loss, None, [feeds], in_float16=half)
    assert [layer.name for layer in report.layers] == ["output", "net/kernel", "net/bias"]
    assert report["output"].activations.total == 2
    factors = (1.0, report.suggested_loss_scale)
    exact, rounded = (session.run(each, {**feeds, scale: by}) for each, by in zip(by_hand, factors, strict=True))
    for name, one, other in zip(("net/kernel", "net/bias"), exact, rounded, strict=True):
        difference = np.float64(one) - np.float64(other) / report.suggested_loss_scale
        expected = np.linalg.norm(difference) / np.linalg.norm(np.float64(one))
        assert report[name].relative_error == pytest.approx(expected, rel=1e-6)
    assert 0 < report["net/kernel"].relative_error < 1e-2
    assert report.float16_loss == pytest.approx(report.loss, rel=1e-2)
    assert report.float16_loss != report.loss


def test_suggested_scale_is_that_of_the_largest_gradient(session: tf.compat.v1.Session) -> None:
    v = _variable("v", 2.0)
    session.run(v.initializer)
    report = _check(tfmp.ranges.probe(v * 2.0**-20, "small") * 8.0, None, [None])
    assert (report.suggested_loss_scale, report.loss) == (2**9, 2**-16)
    assert report["v"].weight_gradients.exponents == (-17, -17)


def test_graph_may_read_its_own_input(session: tf.compat.v1.Session) -> None:
    count = tf.compat.v1.get_variable("count", [], initializer=tf.compat.v1.zeros_initializer(), trainable=False)
    v = _variable("v", 1.0)
    with tf.control_dependencies([tf.compat.v1.assign_add(count, 1.0)]):
        loss = v * 2.0
    session.run(tf.compat.v1.global_variables_initializer())
    report = _check(loss, None, [None] * 3)
    assert (report.batches, session.run(count)) == (3, 3)
    assert _check(loss, None, iter([None] * 9), num_batches=2).batches == 2


def test_session_may_be_passed() -> None:
    with tf.Graph().as_default() as graph:
        v = _variable("v", 1.0)
        loss = v * 3.0
        with_session = tf.compat.v1.Session(graph=graph)
        with_session.run(v.initializer)
        assert _check(loss, None, [None], session=with_session).loss == 3
        with_session.close()


def test_passed_session_goes_before_the_default_one(session: tf.compat.v1.Session) -> None:
    v = _variable("v", 1.0)
    session.run(v.initializer)
    with tf.compat.v1.Session(graph=session.graph) as other:
        other.run(v.initializer)
        other.run(tf.compat.v1.assign(v, 5.0))
        assert _check(v * 1.0, None, [None], session=session).loss == 1
        assert _check(v * 1.0, None, [None]).loss == 5


def test_only_given_variables_are_looked_at(session: tf.compat.v1.Session) -> None:
    one, two = _variable("one", 1.0), _variable("two", 2.0)
    session.run(tf.compat.v1.global_variables_initializer())
    loss = one * two
    assert [layer.name for layer in _check(loss, None, [None]).layers] == ["one", "two"]
    assert [layer.name for layer in _check(loss, None, [None], variables=[two]).layers] == ["two"]


def test_probes_that_the_loss_does_not_depend_on_are_left_out(session: tf.compat.v1.Session) -> None:
    v = _variable("v", 1.0)
    tfmp.ranges.probe(v * 7.0, "beside")
    loss = tfmp.ranges.probe(v * 3.0, "within")
    session.run(v.initializer)
    assert [layer.name for layer in _check(loss, None, [None]).layers] == ["within", "v"]


def test_mean_of_a_loss_of_any_shape_is_taken(session: tf.compat.v1.Session) -> None:
    v = _variable("v", [1.0, 3.0])
    session.run(v.initializer)
    report = _check(v * 2.0, None, [None])
    assert (report.loss, report["v"].weight_gradients.to_dict()) == (4, {"0": 2})


def test_variables_are_as_before_and_two_checks_find_the_same(session: tf.compat.v1.Session) -> None:
    x, y = _placeholders()
    loss, half = _loss(x, y), _loss(x, y, tf.float16)
    variables = tf.compat.v1.global_variables()
    session.run(tf.compat.v1.global_variables_initializer())
    before = [value.tolist() for value in session.run(variables)]
    first, second = (_check(loss, None, [{x: _X, y: _Y}], in_float16=half) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert [value.tolist() for value in session.run(variables)] == before
    assert list(map(id, tf.compat.v1.global_variables())) == list(map(id, variables))


def test_without_a_session_it_is_asked_for() -> None:
    with tf.Graph().as_default(), pytest.raises(ValueError, match=r"there is no session: pass session\.$"):
        _check(_variable("v", 1.0) * 2.0, None, [None])


def test_no_feeds_are_refused(session: tf.compat.v1.Session) -> None:
    with pytest.raises(ValueError, match=r"batches is empty"):
        _check(_variable("v", 1.0) * 2.0)


def test_loss_without_gradients_is_refused(session: tf.compat.v1.Session) -> None:
    v = _variable("v", 1.0)
    session.run(v.initializer)
    with pytest.raises(ValueError, match=r"the loss has no gradients other than 0"):
        _check(v * 0.0, None, [None])


def test_loss_that_is_infinite_is_refused(session: tf.compat.v1.Session) -> None:
    v = _variable("v", 1.0)
    session.run(v.initializer)
    with pytest.raises(ValueError, match=r"the loss is inf in float32 already"):
        _check(v / 0.0, None, [None])


def test_session_is_enough_outside_of_the_graph() -> None:
    with tf.Graph().as_default() as graph:
        v = tf.compat.v1.get_variable("v", [], initializer=tf.compat.v1.ones_initializer())
        loss = v * 3.0
        session = tf.compat.v1.Session(graph=graph)
        session.run(v.initializer)
    assert tfmp.check_precision(loss, None, [None], session=session, progress=False).loss == 3
