import tensorflow as tf

from tfmp.core.findings import Findings
from tfmp.core.verdicts import Verdict


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


def test_iterations_that_were_applied_in_part_are_counted_beyond_their_end() -> None:
    findings, counts = Findings(), []
    for iteration in [(True, True), (True, False), (False, True), (False, False), ()]:
        for applied in iteration:
            findings.note(_verdict(applied, applied, 1.0))
        findings.clear()
        counts.append(int(findings.in_part))
    assert counts == [0, 1, 2, 2, 2]
