"""R9: custom getters that keep variables in float32, which run unchanged."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import argument
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R9"
_CASTS = ("tensorflow.cast", "tensorflow.python.ops.math_ops.cast")
_MESSAGE = (
    "This function keeps variables in float32 and hands the layers a cast of them, as mixed precision needs. It runs "
    "as it is. tfmp.float32_variable_storage_getter does the same for trainable variables, and is tested on each "
    "TensorFlow version."
)


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report functions that request a dtype from the getter they receive, and use float32 and a cast."""
    del options
    if "float32" not in script.text:
        return
    getters = {script.function_of(call) for call in script.nodes(cst.Call) if _is_getter(script, call)}
    casts = {script.function_of(call) for call in script.nodes(cst.Call) if script.name_of(call.func) in _CASTS}
    floats = {script.function_of(use.node) for use in script.uses if use.name == "tensorflow.float32"}
    for function in getters & casts & floats:
        if function is not None:
            detail = f"The function is {function.name.value}."
            yield Finding(RULE, script.line(function.name), Level.NOTE, _MESSAGE, detail)


def _is_getter(script: Script, call: cst.Call) -> bool:
    """Tell whether a call is of the first parameter of the function around it, with a `dtype`."""
    function = script.function_of(call)
    every = (*function.params.params, *function.params.kwonly_params) if function is not None else ()
    first = next((each.name.value for each in every if each.name.value != "self"), "")
    return isinstance(call.func, cst.Name) and call.func.value == first and argument(call, 2, "dtype") is not None
