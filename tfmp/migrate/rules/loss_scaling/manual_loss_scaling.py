"""R8: losses that a script scales itself, without a check for overflow."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.manual_scaling import find_manual_scaling, python_number
from tfmp.migrate.edits.results import Finding, Level, Result

RULE = "R8"
# A script that calls one of these functions checks for overflow itself.
_CHECKS = ("is_finite", "is_nan", "is_inf", "check_numerics", "add_check_numerics_ops")


def report(script: Script) -> Iterator[Result]:
    """Report gradients that are divided by the number that their loss was multiplied by."""
    if "gradients" not in script.text:
        return
    if any(name.value in _CHECKS or "float_status" in name.value.lower() for name in script.nodes(cst.Name)):
        return
    optimizers = script.cached(WrappedOptimizers)
    checked = {call for step in optimizers.steps if step.wrapping is not None for call in step.computations}
    for call in script.nodes(cst.Call):
        if optimizers.computes_gradients(call) and call not in checked and not optimizers.computed_by_wrapper(call):
            found = find_manual_scaling(script, call)
            if found is not None:
                scale, line = python_number(script, found[0]), script.line(found[1])
                detail = f"The scale is {scale}, and line {line} divides by it."
                yield Finding(RULE, script.line(call), Level.NOTE, _MESSAGE, detail)


_MESSAGE = (
    "The script multiplies the loss by a loss scale and divides the gradients by it, and does not check them for "
    "overflow: one infinite gradient makes weights infinite or NaN for the rest of the training. Write "
    "tfmp.LossScaleOptimizer(optimizer, tfmp.FixedLossScaleManager(scale)), where scale is a Python number and not a "
    "tensor, and leave out the multiplication and the division: compute_gradients does both, and steps that overflow "
    "are skipped."
)
