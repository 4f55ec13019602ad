import gc
import types
import weakref

import pytest
import tensorflow as tf

from tfmp.core.overflow.local_check import LocalCheck
from tfmp.grad_scaler.call_order import CallOrder


def test_optimizers_are_distinguished_by_identity() -> None:
    class AlwaysEqual:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    calls = CallOrder()
    calls.note_step(AlwaysEqual(), None)
    calls.note_step(AlwaysEqual(), None)
    assert calls.has_steps


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [("adam", "str"), (types.SimpleNamespace(name="critic"), "SimpleNamespace 'critic'")],
)
def test_optimizer_is_named_by_its_type_and_its_name(optimizer: object, named: str) -> None:
    calls = CallOrder()
    calls.note_step(optimizer, None)
    with pytest.raises(RuntimeError, match=rf"step was called already for this optimizer \({named}\) since"):
        calls.validate_step(optimizer)


def test_step_finds_the_check_of_unscale_until_update() -> None:
    calls, seen = CallOrder(), LocalCheck(tf.constant(True))
    calls.note_unscale("sgd", seen, None)
    assert calls.validate_step("sgd") is seen
    assert calls.validate_step("adam") is None
    calls.note_step("sgd", None)
    calls.end()
    assert calls.validate_step("sgd") is None


def test_calls_are_recorded_for_each_graph_and_do_not_keep_it_alive() -> None:
    calls = CallOrder()
    graph = tf.Graph()
    with graph.as_default():
        calls.note_step("sgd", None)
    assert not calls.has_steps
    # This call is recorded for eager code, not for the graph.
    calls.note_step("sgd", None)
    with graph.as_default(), pytest.raises(RuntimeError, match="step was called already"):
        calls.validate_step("sgd")
    function = tf.function(lambda: calls.note_step("sgd", None))
    seen = weakref.ref(function.get_concrete_function().graph)
    del function, graph
    gc.collect()
    assert seen() is None
