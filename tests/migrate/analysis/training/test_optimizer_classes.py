"""Optimizers that increment the global step, and optimizers that do not."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.optimizer_classes import counts

_HEAD = (
    "import tensorflow as tf\nfrom mine import Imported\n\n\n"
    "class Own({base}):\n    def apply_gradients(self, pairs, step=None):\n"
)


@pytest.mark.parametrize(
    ("base", "body", "expected"),
    [
        ("tf.train.Optimizer", "return step.assign_add(1)", True),
        ("tf.train.Optimizer", "return tf.assign(step, step + 1)", True),
        ("tf.train.Optimizer", "return super().apply_gradients(pairs, step)", True),
        ("tf.train.Optimizer", "return super().apply_gradients(pairs)", False),
        ("tf.train.Optimizer", "return self.update(pairs, tf.cast(step, tf.float32))", False),
        ("tf.train.Optimizer", "return self.update(pairs, step)", None),
        ("Imported", "return super().apply_gradients(pairs, step)", None),
        ("Imported", "return tf.no_op()", False),
    ],
)
def test_a_class_is_judged_by_its_apply_gradients(base: str, body: str, expected: bool | None) -> None:
    script = Script(_HEAD.format(base=base) + f"        {body}\n\n\nOwn(0.1)\n")
    assert counts(script, script.nodes(cst.Call)[-1].func) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tf.train.AdamOptimizer", True),
        ("tf.compat.v1.train.AdamOptimizer", True),
        ("AdamWeightDecayOptimizer", False),
        ("tfmp.bert.LAMBOptimizer", True),
        ("other.Optimizer", None),
    ],
)
def test_a_class_from_elsewhere_is_judged_by_its_name(name: str, expected: bool | None) -> None:
    script = Script(f"import other\nimport tensorflow as tf\nimport tfmp.bert\n{name}(0.1)\n")
    assert counts(script, script.nodes(cst.Call)[0].func) is expected
