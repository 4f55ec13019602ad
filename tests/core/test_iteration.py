import gc
import weakref

import pytest
import tensorflow as tf

from tfmp.core.iteration import Calls, Findings
from tfmp.core.scaler import Seen, Verdict


def _verdict(applied: bool, finite: bool, max_abs: float) -> Verdict:
    return Verdict(tf.constant(applied), tf.constant(finite), tf.constant(max_abs))


def test_findings_are_those_of_all_steps_until_they_are_cleared() -> None:
    findings = Findings()
    for verdict in [_verdict(True, True, 4.0), _verdict(True, False, 2.0), _verdict(True, True, 1.0)]:
        findings.note(verdict)
    found = findings.verdict(with_max_abs=True)
    assert [int(findings.steps), bool(found.applied), bool(found.finite), float(found.max_abs)] == [3, True, False, 4]
    findings.clear()
    found = findings.verdict(with_max_abs=True)
    assert [int(findings.steps), bool(found.applied), bool(found.finite), float(found.max_abs)] == [0, True, True, 0]


def test_findings_are_in_no_checkpoint() -> None:
    assert not tf.train.Checkpoint(findings=Findings()).findings._trackable_children()


def test_optimizers_are_told_apart_by_what_they_are() -> None:
    class AlwaysEqual:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    calls = Calls()
    calls.note_step(AlwaysEqual(), None)
    calls.note_step(AlwaysEqual(), None)
    assert calls.stepped


def test_what_was_unscaled_is_known_to_the_step_and_then_forgotten() -> None:
    calls, seen = Calls(), Seen(tf.constant(True))
    calls.note_unscale("sgd", seen)
    assert calls.seen_by_unscale("sgd") is seen
    assert calls.seen_by_unscale("adam") is None
    calls.note_step("sgd", None)
    calls.end()
    assert calls.seen_by_unscale("sgd") is None


def test_graphs_have_calls_of_their_own_and_are_not_kept_alive() -> None:
    calls = Calls()
    graph = tf.Graph()
    with graph.as_default():
        calls.note_step("sgd", None)
    assert not calls.stepped
    # Not in the graph.
    calls.note_step("sgd", None)
    with graph.as_default(), pytest.raises(RuntimeError, match="step was called already"):
        calls.seen_by_unscale("sgd")
    function = tf.function(lambda: calls.note_step("sgd", None))
    seen = weakref.ref(function.get_concrete_function().graph)
    del function, graph
    gc.collect()
    assert seen() is None
