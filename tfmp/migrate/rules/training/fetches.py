"""R11: tensors that a script fetches by their names."""

import re
from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import literal_text, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R11"
# A name below a scope, or the constant end of a name that is built at run time.
_SCOPED = re.compile(r".*/(loss_scale|good_steps|bad_steps)(_\d+)?(:0)?")
_HANDLE_NAME = re.compile(r"([^/%{][^%{]*/)?global_step(_\d+)?:0")
_OVERFLOW = re.compile(r"(.*/)?overflow_status_reduce_all:0 ?")
_RESOURCES = ("enable_resource_variables", "enable_v2_behavior")
_FETCHES = ("SessionRunArgs", "LoggingTensorHook", "NanTensorHook")
_METHODS = ("run", "get_tensor_by_name")


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report names of tensors that no longer exist, or that may belong to another tensor now."""
    del options
    if not any(word in script.text for word in (":0", "get_tensor_by_name", "reduce_all")):
        return
    has_resources = any(use.name.split(".")[-1] in _RESOURCES for use in script.uses)
    for call in script.nodes(cst.Call):
        if script.last_word(call) in _FETCHES or (method(call)[1] in _METHODS and not script.name_of(call.func)):
            for node in _names(script, call):
                text = node.value if isinstance(node, cst.FormattedStringText) else literal_text(node)
                found = _found(text, has_resources)
                if found is not None:
                    yield Finding(RULE, script.line(node), *found, f"The name is {text.strip()}.")


def _names(script: Script, call: cst.Call) -> Iterator[cst.SimpleString | cst.FormattedStringText]:
    """Yield the strings in the arguments of a fetch, including parts of strings that are built at run time."""
    for arg in call.args:
        if arg.keyword is None or arg.keyword.value in ("fetches", "tensors", "loss_tensor", "name"):
            # Any other call returns something else than its string arguments joined together.
            behind = script.cached(DataFlow).nodes_behind(
                arg.value, lambda each: method(each)[1] not in ("format", "join")
            )
            yield from (each for each in behind if isinstance(each, cst.SimpleString | cst.FormattedStringText))


def _found(name: str, has_resources: bool) -> tuple[Level, str] | None:
    if _OVERFLOW.fullmatch(name):
        return Level.FAILS, _NO_STATUS
    if has_resources and _HANDLE_NAME.fullmatch(name):
        return Level.FAILS, _HANDLE
    return (Level.NOTE, _SCOPE) if _SCOPED.fullmatch(name) else None


_HANDLE = (
    "The script enables resource variables, for which this name gives a handle and not a number, so the fetch fails. "
    "Fetch the value: write /Read/ReadVariableOp:0 in place of :0 at the end of the name."
)
_SCOPE = (
    "The tensors of a loss scale manager are named by the scope in which the manager is constructed, as with "
    "tf.contrib, so this fetch fails if that is another scope. optimizer.loss_scale and manager.get_loss_scale() give "
    "the loss scale without a name."
)
_NO_STATUS = (
    "Only the NPU bridge creates this tensor, so the fetch fails without it. Fetch optimizer.last_step_finite of the "
    "loss-scale optimizer in its place, or leave it out."
)
