"""Clipping leaves infinities and NaN where they are, and the gradients before it are known to who asks for them."""

import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, gradient, in_every_form, in_every_mode, of_every_type
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp
from tfmp.core.gradients.arithmetic import values_of
from tfmp.core.gradients.clipping import keep_unclipped, unclipped
from tfmp.types import Gradient, Gradients


def _by_global_norm(grads: Gradients, clip_norm: Any) -> list[Gradient]:
    return tfmp.clip_by_global_norm(grads, clip_norm)[0]


def _by_value(grads: Gradients, limit: Any) -> list[Gradient]:
    return tfmp.clip_by_value(grads, -limit, limit)


_WAYS = [_by_value, tfmp.clip_by_norm, _by_global_norm]
#: By tfmp and by TensorFlow.
_GLOBAL = [tfmp.clip_by_global_norm, tf.clip_by_global_norm]


def _numbers(grads: Gradients) -> list[list[float]]:
    return [values.numpy().astype(float).tolist() for values in values_of(grads)]


@in_every_form
@of_every_type
def test_clipped_gradients_keep_their_types_and_forms(dtype: tf.DType, form: str) -> None:
    grads = [gradient([24.0, -32.0], dtype, form), None, tf.constant(-1.0)]
    for way, expected in [
        (_by_value, [[2.5, -2.5], -1.0]),
        (tfmp.clip_by_norm, [[1.5, -2.0], -1.0]),
        (lambda grads, norm: _by_global_norm([*grads[:2], tf.constant(0.0)], norm), [[1.5, -2.0], 0.0]),
    ]:
        clipped = way(grads, 2.5)
        assert [type(grad) for grad in clipped] == [type(grad) for grad in grads]
        assert [values.dtype for values in values_of(clipped)] == [dtype, tf.float32]
        assert _numbers(clipped) == expected
        if form == "indexed":
            assert clipped[0].indices.numpy().tolist() == [0, 1]
            assert clipped[0].dense_shape is grads[0].dense_shape


@in_every_mode
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clipping_leaves_infinities_and_nan_in_place(mode: str, bad: float) -> None:
    def clip(values: tf.Tensor, rows: tf.Tensor) -> list[list[tf.Tensor]]:
        grads = [values, None, tf.IndexedSlices(rows, tf.constant([3, 3])), tf.constant([3.0, 4.0])]
        return [values_of(way(grads, 2.5)) for way in _WAYS]

    by_value, by_norm, by_global_norm = MODES[mode](clip)(tf.constant([6.0, bad]), tf.constant([8.0, -bad]))
    for (values, rows, healthy), expected in [
        (by_value, [2.5, 2.5, [2.5, 2.5]]),
        (by_norm, [6.0, 8.0, [1.5, 2.0]]),
        (by_global_norm, [6.0, 8.0, [3.0, 4.0]]),
    ]:
        np.testing.assert_array_equal(values, np.float32([expected[0], bad]))
        np.testing.assert_array_equal(rows, np.float32([expected[1], -bad]))
        assert healthy.numpy().tolist() == expected[2]


@in_every_mode
@pytest.mark.parametrize("exponent", [0, -64, -65, -127, -149])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_any_gradient_is_clipped_exactly_by_a_power_of_two(dtype: tf.DType, exponent: int, mode: str) -> None:
    # XLA reorders products of several values.
    for value in (2.0**127, -(2.0**100), 1.5 * 2.0**127, 1.25 * 2.0**101):
        clip = MODES[mode](functools.partial(tfmp.clip_by_norm, clip_norm=abs(value) * 2.0**exponent))
        assert _numbers(clip([tf.constant([value], dtype)])) == [[value * 2.0**exponent]]


@pytest.mark.parametrize("exponent", [0, -1, -64])
def test_gradient_does_not_become_0_by_a_factor_that_is_not_small_and_is_not_copied_by_1(exponent: int) -> None:
    grad, limit = tf.constant(2.0 ** (-126 - exponent)), 2.0**-126
    other = tf.constant(2.0**-exponent)
    clipped, _ = tfmp.clip_by_global_norm([grad, other], 1.0)
    assert _numbers(clipped) == [limit, 1.0]
    assert (clipped[0] is grad) is (exponent == 0)


def test_edges_of_the_norm_are_those_of_tensorflow_or_better() -> None:
    # In their own precision and range.
    wide = [tf.constant([3e100, 4e100], tf.float64), tf.constant([3.1, -0.7], tf.float64)]
    huge, small = tfmp.clip_by_norm(wide, 2.0)
    np.testing.assert_allclose(huge, [1.2, 1.6], rtol=1e-15)
    np.testing.assert_allclose(small, tf.clip_by_norm(wide[1], 2.0), rtol=1e-15)
    # A norm of 0 divides nothing.
    zeros = [tf.zeros([2]), tf.zeros([0]), None]
    (by_global_norm, norm), by_norm = tfmp.clip_by_global_norm(zeros, 1.0), tfmp.clip_by_norm(zeros, 1.0)
    assert _numbers(by_global_norm) == _numbers(by_norm) == [[0.0, 0.0], []]
    assert float(norm) == 0
    # Rows with the same index count separately.
    slices = tf.IndexedSlices(tf.constant([3.0, 4.0]), tf.constant([1, 1]), tf.constant([2]))
    (clipped, norm), (expected, of_tensorflow) = (each([slices], 2.5) for each in _GLOBAL)
    assert _numbers(clipped) == _numbers(expected) == [[1.5, 2.0]]
    assert float(norm) == float(of_tensorflow) == 5


def test_one_bound_may_be_a_tensor_of_a_graph() -> None:
    @tf.function(autograph=False)
    def clip(limit: tf.Tensor) -> list[tf.Tensor]:
        grad = tf.constant([3.0, -4.0])
        return [tfmp.clip_by_value(grad, -limit, 1), tfmp.clip_by_value(grad, -1, limit)]

    assert _numbers(clip(tf.constant(2.5))) == [[1.0, -2.5], [2.5, -1.0]]
    # The bounds may be the same.
    assert _numbers([tfmp.clip_by_value(tf.constant([1.0, -3.0]), -1, -1)]) == [[-1.0, -1.0]]


@pytest.mark.parametrize("way", _WAYS)
def test_limit_may_be_a_tensor_has_the_precision_of_float64_and_may_be_nan(way: Callable[..., Any]) -> None:
    grads = [tf.constant([3.0, 4.0])]
    assert _numbers(way(grads, tf.Variable(2.5, dtype=tf.float16))) == _numbers(way(grads, 2.5))
    assert _numbers(way([tf.constant([1.0], tf.float64)], 0.1)) == [[0.1]]
    assert np.isnan(_numbers(way(grads, tf.constant(math.nan)))).all()


_VALUES = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@settings(max_examples=60)
@given(st.lists(st.lists(_VALUES, min_size=3, max_size=3), min_size=2, max_size=2), st.floats(2.0**-10, 2.0**14))
def test_ordinary_gradients_are_clipped_as_by_tensorflow(values: list[list[float]], limit: float) -> None:
    grads = [tf.constant(values[0]), tf.IndexedSlices(tf.constant(values[1]), tf.constant([2, 0, 2]))]
    (clipped, norm), (expected, of_tensorflow) = (each(grads, limit) for each in _GLOBAL)
    np.testing.assert_allclose(_numbers(clipped), _numbers(expected), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(norm, of_tensorflow, rtol=1e-6, atol=1e-15)
    clipped, expected = tfmp.clip_by_norm(grads, limit), [tf.clip_by_norm(grad, limit) for grad in grads]
    np.testing.assert_allclose(_numbers(clipped), _numbers(expected), rtol=1e-5, atol=1e-30)
    expected = [tf.clip_by_value(grad, -limit / 2, limit) for grad in grads]
    assert _numbers(tfmp.clip_by_value(grads, -limit / 2, limit)) == _numbers(expected)


@pytest.mark.parametrize("way", [_by_value, tfmp.clip_by_norm])
def test_single_gradient_is_clipped_as_in_a_list(way: Callable[..., Any]) -> None:
    slices = tf.IndexedSlices(tf.constant([3.0, -4.0]), tf.constant([1, 0]), tf.constant([2]))
    for grad in (tf.constant([3.0, -4.0]), tf.constant([3.0, math.inf]), slices):
        single = way(grad, 2)
        assert type(single) is type(grad)
        assert _numbers([single]) == _numbers(way([grad], 2))


@in_every_mode
def test_norm_may_exceed_float32(mode: str) -> None:
    clipped, norm = MODES[mode](lambda: tfmp.clip_by_global_norm([tf.fill([4], 2.0**127)], 4.0))()
    assert (_numbers(clipped), float(norm)) == ([[2.0] * 4], 2.0**128)


_NORMS = (tfmp.clip_by_norm, tfmp.clip_by_global_norm)


# test_lists.py passes what is no list of gradients.
@pytest.mark.parametrize(
    ("ways", "grads", "limits", "error", "message"),
    [
        (_WAYS, [], [1.0], ValueError, "grads is empty: pass the gradients"),
        (_WAYS, [None] * 2, [1.0], ValueError, "every gradient is None: the loss depends on none of the variables"),
        (_NORMS, [[1.0]], [0], ValueError, "clip_norm must be greater than 0, got 0"),
        (_NORMS, [[1.0]], [math.nan], ValueError, "clip_norm must be finite, got nan"),
        (_NORMS, [[1.0]], [None], TypeError, "clip_norm must be a number, got None"),
        ([tfmp.clip_by_value], [[1.0]], [1, -1], ValueError, r"clip_value_min must not be greater .* 1 and -1\.$"),
        ([tfmp.clip_by_value], [[1.0]], [1, math.inf], ValueError, "clip_value_max must be finite, got inf"),
        ([tfmp.clip_by_value], [[1.0]], [None, 1], TypeError, "clip_value_min must be a number, got None"),
    ],
)
def test_wrong_argument_is_refused(
    ways: Any, grads: list[Any], limits: list[Any], error: type[Exception], message: str
) -> None:
    for way in ways:
        with pytest.raises(error, match=f"^{message}"):
            way([None if grad is None else tf.constant(grad) for grad in grads], *limits)


@in_every_form
@pytest.mark.parametrize("mode", ["eager", "function", pytest.param("graph", marks=pytest.mark.graph)])
def test_gradient_before_clipping_is_known_only_if_it_is_kept(form: str, mode: str) -> None:
    def check() -> None:
        grad = gradient([3.0, 4.0], form=form)
        keep_unclipped(None)
        assert unclipped(None) is None
        clipped, _ = tfmp.clip_by_global_norm([grad], 1.0)
        assert unclipped(clipped[0]) is clipped[0]
        keep_unclipped(grad)
        assert unclipped(grad) is grad
        twice = tfmp.clip_by_value(tfmp.clip_by_norm([grad], 1.0), -0.5, 0.5)
        assert values_of([unclipped(twice[0])])[0] is values_of([grad])[0]

    if mode == "graph":
        with tf.Graph().as_default():
            check()
    else:
        MODES[mode](check)()


def test_gradient_lives_as_long_as_what_was_clipped_from_it() -> None:
    grad = gradient([3.0, 4.0])
    before = dict(vars(grad))
    keep_unclipped(grad)
    (clipped,) = tfmp.clip_by_norm([grad], 1.0)
    # Nothing is set on tensors.
    assert (vars(grad), vars(clipped)) == (before, {})
    gone = weakref.ref(grad)
    del grad
    assert unclipped(clipped) is gone()
    del clipped
    assert gone() is None


def test_graph_in_which_gradients_were_clipped_is_deleted() -> None:
    with tf.Graph().as_default() as graph:
        grad = gradient([3.0, 4.0])
        keep_unclipped(grad)
        tfmp.clip_by_norm([grad], 1.0)
    gone = weakref.ref(graph)
    del graph, grad
    gc.collect()
    assert gone() is None
