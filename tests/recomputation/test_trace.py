from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfmp.recomputation.trace import Trace


def test_results_have_the_tensors_of_eager_code_and_all_else_as_it_is() -> None:
    outside = tf.constant(4.0)
    trace = Trace(lambda inputs: {"x": inputs[0] + 1, "n": tf.constant([1]), "c": outside, "s": ("a", None)}, [outside])
    results = trace.run([tf.constant(2.0)])
    assert (float(results["x"]), results["n"].numpy().tolist(), float(results["c"])) == (3, [1], 4)
    assert results["s"] == ("a", None)


def test_tape_outside_records_nothing_and_tape_inside_does() -> None:
    w = tf.Variable(3.0)

    def slope(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = w**2 * inputs[0]
        return [tape.gradient(y, w), y]

    x = tf.constant(2.0)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        slope_of_w, y = Trace(slope, [x]).run([x])
    assert (float(slope_of_w), float(y)) == (12, 18)
    assert outer.gradient(y, [x, w]) == outer.gradient(slope_of_w, [x, w]) == [None, None]


def test_what_a_tape_watches_is_found_except_for_trainable_variables() -> None:
    watched, other, integer = tf.constant(1.0), tf.constant(2.0), tf.constant(3)
    trained, constant = tf.Variable(1.0), tf.Variable(1.0, trainable=False)

    def function(inputs: list[tf.Tensor]) -> tf.Tensor:
        return watched * other * trained * constant * tf.cast(integer, tf.float32)

    with tf.GradientTape() as tape:
        tape.watch(watched)
        assert [each is watched for each in Trace(function, []).captured()] == [True]
        tape.watch(constant)
        assert [each is constant for each in Trace(function, []).captured()] == [False, True]


def test_each_trace_is_a_new_one() -> None:
    runs: list[None] = []
    for _ in range(2):
        Trace(lambda inputs: runs.append(None), []).run([])
    assert runs == [None, None]


_NUMBERS = tf.constant(np.random.default_rng(7).normal(size=100), tf.float32)


def _scaled(inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    # TensorFlow multiplies the numbers first where it optimizes a graph.
    return inputs[0] * 0.1 * 3.0 * 0.7


def test_run_rounds_as_eager_code_does() -> None:
    assert Trace(_scaled, [_NUMBERS]).run([_NUMBERS]).numpy().tolist() == _scaled([_NUMBERS]).numpy().tolist()


def test_functions_that_run_after_a_trace_are_optimized() -> None:
    Trace(_scaled, [_NUMBERS]).run([_NUMBERS])
    assert tf.function(_scaled)([_NUMBERS]).numpy().tolist() != _scaled([_NUMBERS]).numpy().tolist()
