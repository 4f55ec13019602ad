"""Optimizer steps beside increments of the global step."""

import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.optimizer_steps import Given, optimizer_steps


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("loss, global_step", Given.SAME),
        ("loss, global_step=local_step", Given.OTHER),
        ("loss, **arguments", Given.OTHER),
        ("loss", Given.NONE),
    ],
)
def test_the_counter_that_a_step_receives_is_compared(arguments: str, given: Given) -> None:
    script = Script(f"opt.minimize({arguments})\nglobal_step.assign_add(1)\n")
    assert [step.given for step in optimizer_steps(script)] == [given]


def test_the_optimizers_are_found_through_wrappers_and_branches() -> None:
    script = Script(
        "import tensorflow as tf\nimport tfmp\nopt = LAMBOptimizer() if lamb else tf.train.AdamOptimizer()\n"
        "opt = tf.contrib.tpu.CrossShardOptimizer(opt)\nif fp16:\n    opt = tfmp.LossScaleOptimizer(opt, manager)\n"
        "opt.minimize(loss, global_step)\nglobal_step.assign_add(1)\n"
    )
    (step,) = optimizer_steps(script)
    found = {(each.counts, each.is_berts, each.is_wrapped) for each in step.optimizers}
    assert found == {(counts, not counts, wrapped) for counts in (True, False) for wrapped in (True, False)}
    assert [script.line(each) for each in step.wrappers] == [6]


def test_optimizers_are_unknown_if_one_of_them_is() -> None:
    script = Script("opt = given or make()\nopt.minimize(loss, global_step)\nglobal_step.assign_add(1)\n")
    assert [step.optimizers for step in optimizer_steps(script)] == [[]]
