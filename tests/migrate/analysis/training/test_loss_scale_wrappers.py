"""The wrappers around the optimizers of a script."""

import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers

_WRAP = "opt = tfmp.LossScaleOptimizer(opt, manager)\n"


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        (_WRAP, True),
        (f"opt = make()\nif float16:\n    {_WRAP}", False),
        (f"{_WRAP}opt = hvd.DistributedOptimizer(opt)\n", True),
        ("def make():\n    return tfmp.LossScaleOptimizer(o, m)\nopt = make()\n", True),
        ("opt = other.LossScaleOptimizer(opt, manager)\n", None),
        ("opt = make()\n", None),
    ],
)
def test_a_wrapper_is_found_through_assignments_and_functions(text: str, certain: bool | None) -> None:
    script = Script(f"import other\nimport tfmp\n{text}opt.minimize(loss)\n")
    ((_, owner),) = script.methods("minimize")
    wrapping = WrappedOptimizers(script).wrapping(owner)
    assert (None if wrapping is None else wrapping.certain) is certain
