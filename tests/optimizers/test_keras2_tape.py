"""The tape that a user's own `compute_gradients` gets."""

from typing import Any

import tensorflow as tf

from tfmp.optimizers.keras2_tape import ScalingTape


def _tape(seen: list[float]) -> ScalingTape:
    def scale(loss: tf.Tensor) -> tf.Tensor:
        seen.append(float(loss))
        return loss * 8

    def unscale(grads: Any) -> list[Any]:
        return [None if grad is None else grad / 8 for grad in grads]

    return ScalingTape(tf.GradientTape(), scale, unscale)


def test_gradients_have_the_structure_of_the_sources_and_their_true_magnitude() -> None:
    w, unused = tf.Variable(3.0), tf.Variable(1.0)
    seen: list[float] = []
    tape = _tape(seen)
    with tape:
        loss = w * w
    grads = tape.gradient(loss, {"w": w, "unused": unused})
    assert (float(grads["w"]), grads["unused"], seen) == (6, None, [9])


def test_other_methods_are_those_of_the_tape() -> None:
    tape, x = _tape([]), tf.constant(3.0)
    with tape:
        tape.watch(x)
        loss = x * x
    assert tape.watched_variables() == ()
    assert float(tape.gradient(loss, x)) == 6
