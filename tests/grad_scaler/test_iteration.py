"""What an iteration holds until its end; the tests of the scaler show it with optimizers."""

import pytest
import tensorflow as tf

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.overflow.results import EarlierCheck, LocalResult, StepResult
from tfmp.core.step.scaler import LossScaler
from tfmp.grad_scaler.iteration import Iteration


def _iteration(needs_max_abs: bool = False, is_strict: bool = True) -> Iteration:
    scaler = LossScaler(tfmp.FixedLossScaleManager(8), tfmp.NonFiniteDetector(), is_distributed=False)
    return Iteration(scaler, needs_max_abs=needs_max_abs, is_strict=is_strict)


class _Adjust:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, float | None, bool | None]] = []

    def __call__(self, result: StepResult, is_step: tf.Tensor | None) -> None:
        max_abs = None if result.max_abs is None else float(result.max_abs)
        self.calls.append((bool(result.applied), max_abs, None if is_step is None else bool(is_step)))


@pytest.mark.parametrize(("needs_max_abs", "largest"), [(False, None), (True, 3.0)])
def test_end_adjusts_by_what_was_kept_and_begins_the_next_iteration(needs_max_abs: bool, largest: float | None) -> None:
    iteration, adjust = _iteration(needs_max_abs), _Adjust()
    for applied, max_abs in [(True, 3.0), (False, 2.0)]:
        result = StepResult(tf.constant(applied), tf.constant(max_abs))
        iteration.note_steps(["adam" if applied else "sgd"], result, [None], SingleProcess())
    iteration.end(adjust)
    assert int(iteration.pending.get("results")) == 0
    iteration.calls.validate_step("sgd", [])
    # A step that Python has seen certainly counts. Gradients that were unscaled for a step that was dropped do not.
    earlier = EarlierCheck(LocalResult(tf.constant(True)))
    result = StepResult(tf.constant(True), tf.constant(0.0))
    returned = tf.constant(1.0)
    iteration.note_unscale("sgd", earlier, result, None, SingleProcess(), [tf.constant(8.0)], [returned])
    assert iteration.calls.validate_step("sgd", [returned]) == ([earlier], [False])
    iteration.end(adjust)
    assert adjust.calls == [(False, largest, None), (True, None if largest is None else 0, False)]


@pytest.mark.parametrize("is_noted", [True, False])
def test_end_that_may_be_empty_counts_only_what_was_found(is_noted: bool) -> None:
    iteration, adjust = _iteration(), _Adjust()
    if is_noted:
        iteration.calls.note_step("sgd", None)
    iteration.end(adjust, sets_scale=True)
    assert adjust.calls == [(True, None, False)]


def test_end_of_nothing_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^update was called, and no optimizer has stepped since the last update"):
        _iteration().end(_Adjust())


def test_iteration_that_is_given_up_counts_its_overflow_and_forgets_its_calls() -> None:
    iteration, adjust = _iteration(), _Adjust()
    iteration.give_up(adjust)
    for applied in (True, False):
        iteration.note_steps(["sgd"], StepResult(tf.constant(applied)), [None], SingleProcess())
        iteration.give_up(adjust)
        iteration.calls.validate_step("sgd", [])
    assert adjust.calls == [(True, None, False), (False, None, True)]


@pytest.mark.graph
def test_ops_of_a_graph_run_before_the_end(session: tf.compat.v1.Session) -> None:
    iteration = _iteration()
    counted = tf.compat.v1.get_variable("counted", initializer=0, use_resource=True)
    seen = tf.compat.v1.get_variable("seen", initializer=0, use_resource=True)
    for end in (lambda: iteration.end(lambda result, is_step: seen.assign(counted).op), iteration.end_unchecked):
        iteration.calls.note_step("sgd", counted.assign_add(1).op)
        end_op = end()
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(end_op)
        assert session.run(counted) == 1
    assert list(iteration.calls.ops()) == []
    with pytest.raises(RuntimeError, match=r"^update was built before any step"):
        iteration.end(_Adjust())


def test_kept_result_is_in_a_saved_model_and_not_in_a_checkpoint() -> None:
    iteration = _iteration()
    assert not iteration._trackable_children()
    assert "pending" in iteration._trackable_children("savedmodel")
