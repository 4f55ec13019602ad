import gc
import types
import weakref

import pytest
import tensorflow as tf

from tfmp.core.overflow.results import EarlierCheck, LocalResult
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
        calls.validate_step(optimizer, [])


def test_step_finds_the_check_of_unscale_until_update() -> None:
    calls, seen, grad = CallOrder(), EarlierCheck(LocalResult(tf.constant(True))), tf.constant(1.0)
    calls.note_unscale("sgd", seen, None, [tf.constant(8.0)], [grad])
    (found,), scaled = calls.validate_step("sgd", [grad])
    assert (found is seen, scaled) == (True, [False])
    assert calls.validate_step("adam", [grad]) == ([], [True])
    calls.note_step("sgd", None)
    calls.end()
    assert calls.validate_step("sgd", [tf.constant(1.0)]) == ([], [True])


@pytest.mark.parametrize("stepped", ["sgd", "adam"])
def test_what_unscale_found_is_used_by_a_step_of_its_optimizer_only(stepped: str) -> None:
    calls = CallOrder()
    calls.note_unscale("sgd", EarlierCheck(LocalResult(tf.constant(True))), None)
    calls.note_step(stepped, None)
    with tf.Graph().as_default():
        if stepped == "sgd":
            assert calls.validate_step("sgd", [tf.constant(1.0)]) == ([], [True])
        else:
            with pytest.raises(RuntimeError, match=r"unscale was called for this optimizer \(str\) outside of the"):
                calls.validate_step("sgd", [tf.constant(1.0)])


def test_step_in_another_function_does_not_use_what_unscale_found() -> None:
    calls = CallOrder()
    calls.note_unscale("sgd", EarlierCheck(LocalResult(tf.constant(True))), None)
    with tf.Graph().as_default():
        calls.note_step("sgd", None)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="unscale was called for this optimizer"):
        calls.validate_step("sgd", [tf.constant(1.0)])


def test_calls_are_recorded_for_each_graph_and_do_not_keep_it_alive() -> None:
    calls = CallOrder()
    graph = tf.Graph()
    with graph.as_default():
        calls.note_step("sgd", None)
    assert not calls.has_steps
    # This call is recorded for eager code, not for the graph.
    calls.note_step("sgd", None)
    with graph.as_default(), pytest.raises(RuntimeError, match="step was called already"):
        calls.validate_step("sgd", [tf.constant(1.0)])
    function = tf.function(lambda: calls.note_step("sgd", None))
    seen = weakref.ref(function.get_concrete_function().graph)
    del function, graph
    gc.collect()
    assert seen() is None


def test_update_on_a_replica_forgets_the_calls_of_this_replica_only(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    calls, found = CallOrder(), {}

    def unscale_and_step() -> None:
        calls.note_unscale("sgd", EarlierCheck(LocalResult(tf.constant(True))), None)
        calls.note_step("sgd", None)

    def end_on_the_second() -> None:
        replica = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
        if replica == 1:
            calls.end()
            found[replica] = calls.validate_step("sgd", [])
        else:
            with pytest.raises(RuntimeError, match="step was called already"):
                calls.validate_step("sgd", [tf.constant(1.0)])

    two_replicas.run(unscale_and_step)
    two_replicas.run(end_on_the_second)
    assert found == {1: ([], [])}
    # Nor is what `unscale` found on the first replica forgotten.
    assert calls.has_unscaled
    calls.end()
    assert not calls.has_unscaled


def test_what_unscale_found_is_forgotten_with_the_function_that_was_traced() -> None:
    calls = CallOrder()
    traced = tf.function(
        lambda: calls.note_unscale("sgd", EarlierCheck(LocalResult(tf.constant(True))), None)
    ).get_concrete_function()
    with pytest.raises(RuntimeError, match="unscale was called for this optimizer"):
        calls.validate_step("sgd", [tf.constant(1.0)])
    calls.end()
    assert calls.validate_step("sgd", [tf.constant(1.0)]) == ([], [True])
    del traced


def test_update_on_a_replica_leaves_the_calls_that_were_made_outside(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    calls = CallOrder()
    two_replicas.run(calls.end)
    calls.note_step("sgd", None)
    two_replicas.run(calls.end)
    assert calls.has_steps
    calls.end()
    assert not calls.has_steps
