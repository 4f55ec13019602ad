"""R11: tensors that a script fetches by their names, and that only the NPU bridge creates."""

import re
from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import literal_text
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R11"
_OVERFLOW = re.compile(r"(.*/)?overflow_status_reduce_all:0 ?")


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report names of tensors that do not exist without the NPU bridge."""
    del options
    for node in script.nodes(cst.SimpleString) if "overflow_status_reduce_all" in script.text else ():
        if _OVERFLOW.fullmatch(literal_text(node)):
            yield Finding(RULE, script.line(node), Level.FAILS, _MESSAGE, f"The name is {literal_text(node).strip()}.")


_MESSAGE = (
    "Only the NPU bridge creates the tensor of this name, so to fetch it fails without the bridge. Fetch "
    "optimizer.last_step_finite of the loss-scale optimizer in its place, or leave it out."
)
