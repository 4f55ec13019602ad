"""R16: numbers that float16 does not hold, in tensors that may be of this type."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.operands import operands
from tfmp.migrate.edits.results import Finding, Level, Result

RULE = "R16"
_LARGEST = 65504.0
# Functions that return their first argument in the type of the second one, or of the argument `dtype`.
_CASTS = {f"tensorflow.{name}": name for name in ("cast", "constant", "convert_to_tensor")}
_FLOAT16 = ("tensorflow.float16", "tensorflow.half")
# Functions that return the values of their first argument in another shape.
_MOVES = ("expand_dims", "reshape", "squeeze", "tile", "transpose", "broadcast_to", "stop_gradient", "identity")


def report(script: Script) -> Iterator[Result]:
    """Report large numbers that are cast to the type of another tensor, or multiplied by a mask of such a type."""
    if not any(_is_beyond(number) for number in script.nodes(cst.Float)):
        return
    for node in script.nodes(cst.Call, cst.BinaryOperation, cst.AugAssign):
        number, dtype = _cast(script, node) if isinstance(node, cst.Call) else (None, None)
        if number is None or not _is_large(script, number):
            number, dtype = _product(script, node)
        if number is not None and dtype is not None:
            detail = f"The number is {script.code(number)}, and the type is {script.code(dtype)}."
            yield Finding(RULE, script.line(node), Level.NOTE, _MESSAGE, detail)


def _cast(script: Script, call: cst.Call) -> tuple[cst.BaseExpression | None, cst.BaseExpression | None]:
    """Return what a call casts, and the type if that may be float16."""
    name = script.name_of(call.func)
    dtype = argument(call, 1, "dtype") if name in _CASTS else None
    if dtype is None or not _may_be_float16(script, dtype) or not call.args:
        return None, None
    return call.args[0].value, dtype


def _product(script: Script, node: cst.CSTNode) -> tuple[cst.BaseExpression | None, cst.BaseExpression | None]:
    """Return the number that a mask is multiplied by, and the type that the mask was cast to."""
    pair = operands(script, node, cst.Multiply)
    for number, mask in (pair, pair[::-1]) if pair else ():
        if _is_large(script, number):
            dtype = _type_of_mask(script, mask)
            if dtype is not None:
                return number, dtype
    return None, None


def _type_of_mask(script: Script, mask: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the type that a mask, or what it is computed from, is cast to, if that may be float16."""
    flow, seen, stack = script.cached(DataFlow), set(), [mask]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += flow.values(node).nodes
        stack += [*operands(script, node, cst.Subtract), *operands(script, node, cst.Add)]
        if isinstance(node, cst.Subscript):
            stack.append(node.value)
        if not isinstance(node, cst.Call):
            continue
        dtype = _cast(script, node)[1]
        if dtype is not None:
            return dtype
        stack += flow.returned_by(node)
        if script.last_word(node) in _MOVES and node.args:
            stack.append(node.args[0].value)
    return None


def _may_be_float16(script: Script, dtype: cst.BaseExpression) -> bool:
    """Tell whether an expression is float16, the type of a tensor, or a parameter for a type."""
    flow, seen, stack = script.cached(DataFlow), set(), [dtype]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        values = flow.values(node).nodes
        is_tensors = isinstance(node, cst.Attribute) and node.attr.value in ("dtype", "base_dtype")
        is_parameter = isinstance(node, cst.Name) and "dtype" in node.value and not values
        if script.name_of(node) in _FLOAT16 or is_tensors or (is_parameter and not script.name_of(node)):
            return True
        stack += [*values, *((node.body, node.orelse) if isinstance(node, cst.IfExp) else ())]
    return False


def _is_large(script: Script, node: cst.BaseExpression) -> bool:
    """Tell whether an expression is a number beyond float16, or a name for one."""
    return any(map(_is_beyond, (node, *script.cached(DataFlow).values(node).nodes)))


def _is_beyond(node: cst.BaseExpression) -> bool:
    """Tell whether an expression is a number that float16 does not hold.

    A number without a fraction and an exponent, such as 100000, is left out: it is rather a size or an id.
    """
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        node = node.expression
    return isinstance(node, cst.Float) and float(node.evaluated_value) > _LARGEST


_MESSAGE = (
    "float16 holds numbers up to 65504, so in float16 this number is infinite. Infinity times 0 is NaN: where a mask "
    "of zeros and ones multiplies it, each result is NaN, and each step of the training is skipped. If the tensor may "
    "be in float16, as at the levels O1 to O3, write a number that float16 holds, such as 6e4 or -6e4; after a softmax "
    "it has the same effect."
)
