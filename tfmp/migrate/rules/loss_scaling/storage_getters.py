"""R9: custom getters that keep variables in float32, which run unchanged."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R9"
_CASTS = ("tensorflow.cast", "tensorflow.python.ops.math_ops.cast")
_MESSAGE = (
    "{name} keeps variables in float32 and hands the graph a cast: it runs as it is. "
    "tfmp.float32_variable_storage_getter does so for trainable variables, tested on each TensorFlow."
)


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report functions that request float32 from the getter they receive, and return its variable cast."""
    del options
    if "float32" not in script.text:
        return
    for function, calls in _calls_by_function(script).items():
        if _stores_in_float32(script, function, calls):
            message = _MESSAGE.format(name=function.name.value)
            yield Finding(RULE, script.line(function.name), Level.NOTE, message)


def _calls_by_function(script: Script) -> dict[cst.FunctionDef, list[cst.Call]]:
    """Return the calls of each function."""
    found: dict[cst.FunctionDef, list[cst.Call]] = {}
    for call in script.nodes(cst.Call):
        function = script.function_of(call)
        if function is not None:
            found.setdefault(function, []).append(call)
    return found


def _stores_in_float32(script: Script, function: cst.FunctionDef, calls: Sequence[cst.Call]) -> bool:
    """Tell whether a function calls its first parameter with `dtype=tf.float32` and casts the result."""
    params = [each.name.value for each in (*function.params.params, *function.params.kwonly_params)]
    getter = next(iter([name for name in params if name != "self"]), "")
    got = [call for call in calls if getter and _calls(call, getter) and _asks_for_float32(script, call)]
    casts = [call for call in calls if script.name_of(call.func) in _CASTS and call.args]
    flow = script.cached(DataFlow)
    return bool(got) and any(
        given in flow.nodes_behind(cast.args[0].value, lambda call: _calls(call, getter))
        for cast in casts
        for given in got
    )


def _calls(call: cst.Call, name: str) -> bool:
    return isinstance(call.func, cst.Name) and call.func.value == name


def _asks_for_float32(script: Script, call: cst.Call) -> bool:
    """Tell whether the `dtype` of a call may be `tf.float32`."""
    dtype = argument(call, 2, "dtype")
    if dtype is None:
        return False
    found = script.cached(DataFlow).nodes_behind(dtype, lambda call: True)
    return any(script.name_of(node) == "tensorflow.float32" for node in found)
