import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.grad_scaler.optimizer_step import OptimizerStep, known_together


def _step(known: LocalCheck | None, variables: int = 1) -> OptimizerStep:
    weights = [tf.Variable(0.0, dtype=tf.float16) for _ in range(variables)]
    grads = [tf.constant(1.0)] * variables
    return OptimizerStep(OptimizerAdapter(None, weights), grads, known)


def test_gradients_are_usable_together_only_if_those_of_each_optimizer_are() -> None:
    assert known_together([_step(None), _step(None)]) is None
    usable, incomplete = LocalCheck(tf.constant(True)), LocalCheck(tf.constant(True), complete=tf.constant(False))
    together = known_together([_step(None), _step(usable), _step(incomplete)])
    assert together is not None
    assert (bool(together.usable), bool(together.complete)) == (True, False)
    unusable = known_together([_step(usable), _step(LocalCheck(tf.constant(False)))])
    assert unusable is not None
    assert (bool(unusable.usable), unusable.complete) == (False, None)


def test_overflow_counts_of_a_window_are_in_the_rows_of_its_variables() -> None:
    found = LocalCheck(tf.constant(False), overflow_counts=tf.constant([[1, 0, 0]], tf.int64))
    together = known_together([_step(None, variables=2), _step(found)])
    assert together is not None
    assert together.overflow_counts.numpy().tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]
