"""In a graph, unscaled and clipped gradients can be computed again from scaled ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.gradients.derived_gradients import Derivation, derivation_of, keep_unclipped, unclipped
from tfmp.core.gradients.norms import norm_of_each
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Gradients

_SCALED = [[24.0, -32.0], [float("inf"), 8.0]]


def _scaler() -> LossScaler:
    return LossScaler(tfmp.FixedLossScaleManager(8.0), tfmp.NonFiniteDetector(), is_distributed=False)


def _derived(change: Callable[[Gradients], Any], scaled: Any = _SCALED) -> tuple[Any, Any, Any]:
    """Return what a graph derives of gradients: the gradients, the same computed again, whether they stay finite."""
    scaler = _scaler()

    @tf.function
    def compute(scaled: Gradients) -> tuple[Any, Any, Any]:
        grads = change(scaler.unscale(scaled))
        derivation = derivation_of(grads)
        assert derivation is not None
        return grads, _again(derivation), tf.reduce_all([True, *derivation.keeps_finite])

    return compute([tf.constant(each) for each in scaled])


def _again(derivation: Derivation) -> list[Any]:
    values = [grad / derivation.loss_scale for grad in derivation.scaled]
    pairs = zip(derivation.changes, values, strict=True)
    return [each if change is None else change.apply(each) for change, each in pairs]


@pytest.mark.parametrize(
    "change",
    [
        lambda grads: grads,
        lambda grads: tfmp.clip_by_value(grads, -2.0, 1.0),
        lambda grads: tfmp.clip_by_norm(grads, 2.5),
        lambda grads: tfmp.clip_by_global_norm(grads, 2.5)[0],
        lambda grads: tfmp.clip_by_value(tfmp.clip_by_norm(grads, 2.5), -1.75, 1.75),
        lambda grads: tfmp.clip_by_norm(tfmp.clip_by_value(grads, -1.0, 1.0), 0.5),
    ],
)
@pytest.mark.parametrize("scaled", [_SCALED, [[24.0, -32.0], [1.0, 8.0]]])
def test_gradients_computed_again_are_the_same(change: Callable[[Gradients], Any], scaled: Any) -> None:
    grads, again, keeps_finite = _derived(change, scaled)
    in_eager_code = change([tf.constant(each) / 8 for each in scaled])
    for one, other, expected in zip(grads, again, in_eager_code, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)
        np.testing.assert_allclose(one.numpy(), expected.numpy(), rtol=1e-6)
    assert bool(keeps_finite)


@pytest.mark.parametrize(
    "change",
    [
        lambda grads: tfmp.clip_by_value(grads, tf.constant(float("nan")), 1.0),
        lambda grads: tfmp.clip_by_norm(grads, tf.constant(float("nan"))),
        lambda grads: tfmp.clip_by_norm(grads, tf.constant(-1e3)),
        lambda grads: tfmp.clip_by_global_norm(grads, tf.constant(float("nan")))[0],
    ],
)
def test_clipping_by_what_is_no_bound_may_not_keep_values_finite(change: Callable[[Gradients], Any]) -> None:
    assert not bool(_derived(change, [[24.0, -32.0]])[2])


def test_origin_is_unknown_after_a_change_by_the_user_and_in_eager_code() -> None:
    scaler, of_eager_code = _scaler(), tf.constant([8.0])

    @tf.function
    def check() -> None:
        (known,) = scaler.unscale([tf.constant([8.0])])
        assert derivation_of([known]) is not None
        assert derivation_of([known, None]) is not None
        assert derivation_of(scaler.unscale([of_eager_code])) is not None
        assert derivation_of([None]) is None
        assert derivation_of([known + 1]) is None
        assert derivation_of([known, known + 1]) is None
        # Each time the scale is read, it may be another one.
        assert derivation_of([known, *scaler.unscale([tf.constant([8.0])])]) is None

        @tf.function
        def inner() -> None:
            assert derivation_of([known]) is None

        inner()

    check()
    assert derivation_of(scaler.unscale([tf.constant([8.0])])) is None


def test_indexed_slices_and_none_keep_their_form() -> None:
    @tf.function
    def check(rows: tf.Tensor) -> None:
        scaled = [tf.IndexedSlices(rows, tf.constant([2])), None]
        grads, _ = tfmp.clip_by_global_norm(_scaler().unscale(scaled), 1.0)
        derivation = derivation_of(grads)
        assert derivation is not None
        assert derivation.scaled[0] is scaled[0]
        assert [derivation.scaled[1], derivation.changes[1]] == [None, None]
        assert derivation.changes[0] is not None
        # The values are what counts.
        same_values = tf.IndexedSlices(grads[0].values, grads[0].indices)
        assert derivation_of([same_values, None]) is not None

    check(tf.ones([1, 4]))


def test_norm_of_unscaled_gradients_is_that_of_the_scaled_ones_which_the_check_of_the_step_computes_too() -> None:
    scaler = _scaler()

    @tf.function
    def compute(scaled: Gradients) -> tuple[tf.Tensor, tf.Tensor]:
        grads = scaler.unscale(scaled)
        norm, norms = tfmp.clip_by_global_norm(grads, 2.5)[1], norm_of_each(grads)
        assert grads[0].op.name not in _ops_before(norm)
        assert grads[0].op.name in _ops_before(norms)
        return norm, norms

    norm, norms = compute([tf.constant([24.0, -32.0]), tf.constant([8.0])])
    np.testing.assert_allclose(norm, np.hypot(*norms), rtol=1e-12)


def _ops_before(tensor: tf.Tensor) -> set[str]:
    """Return the names of the ops that a tensor is computed with."""
    found, left = set(), [tensor.op]
    while left:
        op = left.pop()
        if op.name not in found:
            found.add(op.name)
            left.extend(each.op for each in op.inputs)
    return found


def test_gradient_before_clipping_is_known_in_eager_code_only_if_it_is_kept() -> None:
    rows = tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([1]), tf.constant([2, 1]))
    for grad in (tf.constant([3.0, 4.0]), rows):
        clipped, _ = tfmp.clip_by_global_norm([grad], 1.0)
        assert unclipped(clipped[0]) is clipped[0]
        keep_unclipped(grad)
        assert unclipped(grad) is grad
        twice = tfmp.clip_by_value(tfmp.clip_by_norm([grad], 1.0), -0.5, 0.5)
        assert unclipped(twice[0]) is grad
    keep_unclipped(None)
    assert unclipped(None) is None
