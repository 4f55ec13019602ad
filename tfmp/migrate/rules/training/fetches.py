"""R11: tensors that a script fetches by their names."""

import re
from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import literal_text, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R11"
_NAME = re.compile(r"(?P<scope>.*/)?(?P<variable>loss_scale|good_steps|bad_steps|global_step)(_\d+)?:0")
_BUILT = re.compile(r"(^|/)(loss_scale|good_steps|bad_steps)(_\d+)?(:0)?$")
_OVERFLOW = re.compile(r"(.*/)?overflow_status_reduce_all:0 ?")
_RESOURCES = ("enable_resource_variables", "enable_v2_behavior")
_FETCHES = ("SessionRunArgs", "LoggingTensorHook", "NanTensorHook")
_METHODS = ("run", "get_tensor_by_name")


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report names of tensors that no longer exist, or that may belong to another tensor now."""
    del options
    if not any(word in script.text for word in (":0", "get_tensor_by_name", "reduce_all")):
        return
    resources = any(use.name.split(".")[-1] in _RESOURCES for use in script.uses)
    for call in script.nodes(cst.Call):
        if _fetches(script, call):
            for node in _names(script, call):
                yield from _found(script, node, resources)


def _fetches(script: Script, call: cst.Call) -> bool:
    last = script.last_word(call)
    return last in _FETCHES or (method(call)[1] in _METHODS and not script.name_of(call.func))


def _names(script: Script, call: cst.Call) -> Iterator[cst.CSTNode]:
    """Yield the strings in the arguments of a fetch, including strings that are built at run time."""
    flow = script.cached(DataFlow)
    for arg in call.args:
        if arg.keyword is None or arg.keyword.value in ("fetches", "tensors", "loss_tensor", "name"):
            yield from flow.nodes_behind(arg.value, _is_another)


def _is_another(call: cst.Call) -> bool:
    """Tell whether a call returns something other than its string arguments joined together."""
    return method(call)[1] not in ("format", "join")


def _found(script: Script, node: cst.CSTNode, resources: bool) -> Iterator[Finding]:
    line = script.line(node)
    if isinstance(node, cst.SimpleString) and isinstance(node.evaluated_value, str):
        yield from _fixed(node.evaluated_value, line, resources)
    built = _built(node)
    if _BUILT.search(built):
        variable = built.split("/")[-1].removesuffix(":0")
        yield Finding(RULE, line, Level.NOTE, _AT_RUN_TIME.format(variable=variable))


def _fixed(name: str, line: int, resources: bool) -> Iterator[Finding]:
    if _OVERFLOW.fullmatch(name):
        yield Finding(RULE, line, Level.FAILS, _NO_STATUS.format(name=name.strip()))
        return
    match = _NAME.fullmatch(name)
    # A string that starts with a slash, or that has a placeholder, is only a part of a longer name.
    if match is None or name.startswith("/") or "%" in name or "{" in name:
        return
    if match["variable"] == "global_step":
        if resources:
            yield Finding(RULE, line, Level.FAILS, _HANDLE.format(name=name, variable=name.removesuffix(":0")))
    elif match["scope"]:
        yield Finding(RULE, line, Level.NOTE, _SCOPE.format(name=name, scope=match["scope"].rstrip("/")))


def _built(node: cst.CSTNode) -> str:
    """Return the constant end of a name that is built at run time; empty for any other node."""
    if isinstance(node, cst.FormattedString) and node.parts:
        last = node.parts[-1]
        text = last.value if isinstance(last, cst.FormattedStringText) else ""
        return text if len(node.parts) > 1 else ""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        return literal_text(node.right)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
        return literal_text(node.left)
    if isinstance(node, cst.Call) and method(node)[1] == "format":
        return literal_text(method(node)[0])
    return ""


_HANDLE = (
    "this script enables resource variables, where {name} is a handle, not a number: fetch "
    "{variable}/Read/ReadVariableOp:0."
)
_SCOPE = (
    "{name} is found if the manager is made inside the scope {scope}, as with tf.contrib; optimizer.loss_scale and "
    "manager.get_loss_scale() need no name."
)
_AT_RUN_TIME = (
    "this name of {variable} is built at run time, and is found only if it names the scopes that the manager is made "
    "in; optimizer.loss_scale and manager.get_loss_scale() need no name."
)
_NO_STATUS = (
    "the NPU bridge alone makes a tensor {name}: without it the fetch fails. Fetch optimizer.last_step_finite of the "
    "wrapper in its place, or leave it out."
)
