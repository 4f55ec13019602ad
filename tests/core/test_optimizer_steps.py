from typing import Any

import pytest
import tensorflow as tf

from tfmp.core.optimizer_steps import OptimizerStep, seen_together, validated_pairs
from tfmp.core.verdicts import Seen


def _step(seen: Seen | None, variables: int = 1) -> OptimizerStep:
    weights = [tf.Variable(0.0, dtype=tf.float16) for _ in range(variables)]
    grads = [tf.constant(1.0)] * variables
    return OptimizerStep(tf.compat.v1.train.GradientDescentOptimizer(1.0), grads, grads, weights, seen, {})


def test_gradients_are_checked_in_the_types_of_their_variables() -> None:
    step = _step(None)._replace(true_grads=[tf.constant(1e6)])
    assert tf.math.is_inf(step.typed_grads()[0])


def test_optimizers_that_step_together_are_as_usable_as_the_worst_of_them() -> None:
    assert seen_together([_step(None), _step(None)]) is None
    usable, incomplete = Seen(tf.constant(True)), Seen(tf.constant(True), complete=tf.constant(False))
    together = seen_together([_step(None), _step(usable), _step(incomplete)])
    assert together is not None
    assert (bool(together.usable), bool(together.complete)) == (True, False)
    unusable = seen_together([_step(usable), _step(Seen(tf.constant(False)))])
    assert unusable is not None
    assert (bool(unusable.usable), unusable.complete) == (False, None)


def test_overflows_of_a_window_stand_at_the_places_of_their_variables() -> None:
    found = tf.constant([[1, 0, 0]], tf.int64)
    together = seen_together([_step(None, variables=2), _step(Seen(tf.constant(False), overflows=found))])
    assert together is not None
    assert together.overflows.numpy().tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_variable_of_float8_scales_is_refused() -> None:
    class Scale:
        overwrite_with_gradient = True
        assign = None

    with pytest.raises(NotImplementedError, match=r"takes its next value for a gradient.*tfmp.LossScaleOptimizer"):
        validated_pairs(tf.compat.v1.train.GradientDescentOptimizer(1.0), [(tf.constant(1.0), Scale())])


@pytest.mark.parametrize("pairs", [tf.constant([[1.0, 2.0]]), [tf.constant(1.0)], [[tf.constant(1.0)]]])
def test_what_is_no_pair_is_refused(pairs: Any) -> None:
    with pytest.raises(
        TypeError, match=r"must be pairs of a gradient and its variable, .*: pass zip\(grads, variables\)"
    ):
        validated_pairs(tf.compat.v1.train.GradientDescentOptimizer(1.0), pairs)
