"""R11: tensors that a script fetches by names that no longer give what they gave."""

import re
from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import literal_text
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Result

RULE = "R11"
_OVERFLOW = re.compile(r"(.*/)?overflow_status_reduce_all:0 ?")
_GLOBAL_STEP = re.compile(r"(.*/)?global_step(_\d+)?:0")
_RESOURCES = ("enable_resource_variables", "enable_v2_behavior")


def report(script: Script) -> Iterator[Result]:
    """Report names of tensors that only the NPU bridge creates, and of variables' handles."""
    has_handles = any(use.name.split(".")[-1] in _RESOURCES for use in script.uses)
    for node in script.nodes(cst.SimpleString) if ":0" in script.text else ():
        name = literal_text(node).strip()
        if _OVERFLOW.fullmatch(name):
            yield Finding(RULE, script.line(node), Level.FAILS, _OF_THE_BRIDGE, f"The name is {name}.")
        elif has_handles and _GLOBAL_STEP.fullmatch(name):
            instead = f"{name.removesuffix(':0')}/Read/ReadVariableOp:0"
            yield Finding(RULE, script.line(node), Level.FAILS, _HANDLE, f"Fetch {instead} in place of {name}.")


_OF_THE_BRIDGE = (
    "Only the NPU bridge creates the tensor of this name, so to fetch it fails without the bridge. Fetch "
    "optimizer.last_step_finite of the loss-scale optimizer in its place, or leave it out."
)
_HANDLE = (
    "The script turns resource variables on. The tensor of a resource variable's name is a handle of the variable, not "
    "its number, so to fetch it fails."
)
