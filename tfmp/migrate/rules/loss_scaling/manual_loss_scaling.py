"""R8: losses that a script scales itself, without a check for overflow."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.manual_scaling import find_manual_scaling
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R8"
# A script that calls one of these functions checks for overflow itself.
_CHECKS = ("is_finite", "is_nan", "is_inf", "check_numerics", "add_check_numerics_ops")


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report gradients that are divided by the number that their loss was multiplied by."""
    del options
    if "gradients" not in script.text:
        return
    if any(name.value in _CHECKS or "float_status" in name.value.lower() for name in script.nodes(cst.Name)):
        return
    optimizers = script.cached(WrappedOptimizers)
    checked = {node for _, _, behind in optimizers.applied_gradients() for node in behind}
    for call in script.nodes(cst.Call):
        if (
            not optimizers.computes_gradients(call)
            or call in checked
            or optimizers.computed_by_wrapper(call) is not None
        ):
            continue
        found = find_manual_scaling(script, call)
        if found is not None:
            factor, division = found
            message = _message(script.code(factor), script.line(division))
            yield Finding(RULE, script.line(call), Level.NOTE, message)


def _message(scale: str, line: int) -> str:
    return (
        f"the loss is multiplied by {scale} and its gradients are divided by it on line {line}, with no overflow "
        "check: it runs, and an infinite gradient ruins the weights. "
        f"tfmp.LossScaleOptimizer(optimizer, tfmp.FixedLossScaleManager({scale})) does both in compute_gradients, and "
        "also skips steps that overflow."
    )
