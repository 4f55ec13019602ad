import pytest
import tensorflow as tf

from tfmp.core.overflow.results import StepResult
from tfmp.grad_scaler.pending_results import PendingResults


def _result(applied: bool, finite: bool, max_abs: float) -> StepResult:
    """Return the result of a step that may drop micro-batches."""
    return StepResult(tf.constant(applied), tf.constant(max_abs), tf.constant(finite))


def _combined(pending: PendingResults) -> list[float]:
    findings = pending.read()
    result = pending.result(findings, with_max_abs=True)
    return [int(findings.results), bool(result.applied), bool(result.finite), float(result.max_abs)]


def test_result_combines_all_steps_until_it_is_cleared() -> None:
    pending = PendingResults()
    for result in [_result(True, True, 4.0), _result(True, False, 2.0), _result(True, True, 1.0)]:
        pending.add(result, of_step=True)
    assert _combined(pending) == [3, True, False, 4]
    pending.clear(pending.read())
    assert _combined(pending) == [0, True, True, 0]


def test_overflow_of_a_dropped_micro_batch_is_kept_beside_a_step_without_any() -> None:
    pending = PendingResults()
    pending.add(_result(True, False, 1.0), of_step=True)
    pending.add(StepResult(tf.constant(True)), of_step=True)
    assert _combined(pending) == [2, True, False, 1]


def test_finite_equals_applied_if_no_micro_batch_can_be_dropped() -> None:
    pending = PendingResults()
    pending.add(StepResult(tf.constant(True)), of_step=True)
    result = pending.result(pending.read(), with_max_abs=False)
    assert (bool(result.finite), result.max_abs) == (True, None)
    pending = PendingResults()
    pending.add(StepResult(tf.constant(False)), of_step=True)
    result = pending.result(pending.read(), with_max_abs=False)
    assert result.finite is result.applied
    assert not result.finite


def test_results_are_not_saved_in_checkpoints() -> None:
    assert not tf.train.Checkpoint(pending=PendingResults()).pending._trackable_children()


@pytest.mark.graph
def test_results_are_no_variables_of_a_script_with_a_session(session: tf.compat.v1.Session) -> None:
    pending = PendingResults()
    add = pending.add(_result(True, True, 1.0), of_step=True)
    assert tf.compat.v1.global_variables() == []
    # So the script does not initialize them.
    assert session.run(pending.get("results")) == 0
    session.run(add)
    assert session.run(pending.get("results")) == 1


def test_partly_applied_iterations_are_counted_and_not_cleared() -> None:
    pending, counts = PendingResults(), []
    for iteration in [(True, True), (True, False), (False, True), (False, False), ()]:
        for applied in iteration:
            pending.add(_result(applied, applied, 1.0), of_step=True)
        pending.clear(pending.read())
        counts.append(int(pending.get("partial_iterations")))
    assert counts == [0, 1, 2, 2, 2]


def test_overflow_that_unscale_found_is_a_step_and_finite_gradients_without_a_step_are_none() -> None:
    pending, found = PendingResults(), []
    for of_unscale, of_step in [(True, None), (False, None), (True, True), (False, True), (False, False)]:
        pending.add(_result(of_unscale, of_unscale, 1.0), of_step=False)
        if of_step is not None:
            pending.add(_result(of_step, of_step, 1.0), of_step=True)
        findings = pending.read()
        found.append((bool(findings.is_step), bool(pending.result(findings, with_max_abs=False).applied)))
        pending.clear(findings)
    assert found == [(False, True), (True, False), (True, True), (True, False), (True, False)]
    # Only where one optimizer stepped, and the gradients of another overflowed, was the iteration applied in part.
    assert int(pending.get("partial_iterations")) == 1
