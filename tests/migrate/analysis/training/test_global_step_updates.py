"""The calls by which a script increments the global step."""

import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.global_step_updates import global_step_updates


@pytest.mark.parametrize(
    ("text", "conditional"),
    [
        ("global_step.assign_add(1)", [False]),
        ("tf.assign_add(global_step, tf.constant(1))", [False]),
        ("tf.assign(global_step, global_step + 1)", [False]),
        ("global_step.assign(tf.cond(finite, lambda: global_step + 1, lambda: global_step))", [True]),
        ("step = tf.train.get_global_step()\nstep.assign_add(1)", [False]),
        ("global_step.assign_add(2)", []),
        ("global_step.assign(0)", []),
        ("other.assign_add(1)", []),
    ],
)
def test_only_increments_of_the_global_step_by_one_are_found(text: str, conditional: list[bool]) -> None:
    script = Script(f"import tensorflow as tf\n{text}\n")
    assert [update.conditional for update in global_step_updates(script)] == conditional
