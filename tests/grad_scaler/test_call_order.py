import gc
import weakref

import pytest
import tensorflow as tf

from tfmp.core.overflow.local_check import LocalCheck
from tfmp.grad_scaler.call_order import CallOrder


def test_optimizers_are_told_apart_by_what_they_are() -> None:
    class AlwaysEqual:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    calls = CallOrder()
    calls.note_step(AlwaysEqual(), None)
    calls.note_step(AlwaysEqual(), None)
    assert calls.stepped


def test_what_was_unscaled_is_known_to_the_step_and_then_forgotten() -> None:
    calls, seen = CallOrder(), LocalCheck(tf.constant(True))
    calls.note_unscale("sgd", seen)
    assert calls.found_by_unscale("sgd") is seen
    assert calls.found_by_unscale("adam") is None
    calls.note_step("sgd", None)
    calls.end()
    assert calls.found_by_unscale("sgd") is None


def test_graphs_have_calls_of_their_own_and_are_not_kept_alive() -> None:
    calls = CallOrder()
    graph = tf.Graph()
    with graph.as_default():
        calls.note_step("sgd", None)
    assert not calls.stepped
    # Not in the graph.
    calls.note_step("sgd", None)
    with graph.as_default(), pytest.raises(RuntimeError, match="step was called already"):
        calls.found_by_unscale("sgd")
    function = tf.function(lambda: calls.note_step("sgd", None))
    seen = weakref.ref(function.get_concrete_function().graph)
    del function, graph
    gc.collect()
    assert seen() is None
