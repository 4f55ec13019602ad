"""R10: scripts that move global_step beside an optimizer that moves it too."""

from collections.abc import Iterator, Sequence
from enum import Enum

import libcst as cst

from tfmp.migrate.reading.calls import argument, code, function_name, method, methods
from tfmp.migrate.reading.data_flow import DataFlow
from tfmp.migrate.reading.increments import Increment, increments, is_run_with, is_same_counter
from tfmp.migrate.reading.names import dotted
from tfmp.migrate.reading.script import Script
from tfmp.migrate.reading.wrapped import WrappedOptimizers, Wrapping
from tfmp.migrate.results import Finding, Level, Options, Result

RULE = "R10"
_AROUND = ("CrossShardOptimizer", "enable_mixed_precision_graph_rewrite", "npu_tf_optimizer")
_BERTS = ("AdamWeightDecayOptimizer", "LAMBOptimizer")
_KIT = "import tfmp.bert as optimization (Google's: from tfmp.bert import google as optimization)"


class _Given(Enum):
    """Which counter an optimizer's step is given."""

    SAME = 1
    OTHER = 2
    NONE = 3


def report(script: Script, options: Options) -> Iterator[Result]:
    """Tell of steps that are counted twice, and of skipped steps that are counted."""
    del options
    if "assign" not in script.text:
        return
    for increment in increments(script):
        for step, optimizer, given in _applies(script, increment):
            found = _of_step(script, increment, step, optimizer, given)
            together = is_run_with(script, increment, step) if found is not None else False
            if found is not None and together is not False:
                level, message = found
                condition = _IF_BOTH.format(line=script.line(step))
                yield Finding(RULE, script.line(increment.call), level, message if together else condition + message)
                break


def _applies(script: Script, increment: Increment) -> Iterator[tuple[cst.Call, cst.BaseExpression, _Given]]:
    """Return the steps of optimizers beside an increment, and whether they are given the same counter."""
    flow, function = script.once(DataFlow), script.function_of(increment.call)
    for call, owner in methods(script, "apply_gradients", "minimize"):
        if function not in (script.function_of(call), *script.ancestors(call)):
            continue
        if flow.is_exclusive(call, increment.call) or _is_super(owner):
            continue
        yield call, owner, _given(script, increment, call)


def _given(script: Script, increment: Increment, step: cst.Call) -> _Given:
    given = argument(step, 1, "global_step")
    if given is not None:
        return _Given.SAME if is_same_counter(script, given, increment.counter) else _Given.OTHER
    return _Given.OTHER if any(arg.star for arg in step.args) else _Given.NONE


def _is_super(owner: cst.BaseExpression) -> bool:
    return dotted(owner.func if isinstance(owner, cst.Call) else owner) == "super"


def _of_step(
    script: Script, increment: Increment, step: cst.Call, optimizer: cst.BaseExpression, given: _Given
) -> tuple[Level, str] | None:
    wrapping = script.once(WrappedOptimizers).wrapping(optimizer)
    if wrapping is not None:
        return _of_wrapped(script, increment, optimizer, wrapping, script.line(step), given)
    if given is not _Given.SAME:
        return None
    inner = _innermost(script, optimizer)
    counting = [node for node in inner if _is_stock(script, node) or _is_kits(script, node)]
    if (inner and len(counting) == len(inner)) or any(_counts(script, node) for node in inner):
        name = dotted(optimizer) or "the optimizer"
        counter = code(script, increment.counter)
        # LAMB needs it to correct its moments.
        mend = _DELETE_THIS if all(_is_kits(script, node) for node in inner) else _OR_LEAVE_OUT
        return Level.TODO, _TWICE.format(counter=counter, optimizer=name, line=script.line(step), mend=mend)
    if inner and all(_is_berts(node) for node in inner):
        return Level.NOTE, _BERT
    return None


def _of_wrapped(
    script: Script,
    increment: Increment,
    optimizer: cst.BaseExpression,
    wrapping: Wrapping,
    line: int,
    given: _Given,
) -> tuple[Level, str] | None:
    counter = code(script, increment.counter)
    said = script.once(WrappedOptimizers).said(optimizer, wrapping)
    inner = _innermost(script, optimizer)
    is_original = any(_is_berts(node) and not _is_kits(script, node) for node in inner)
    kit = f" BERT's own way is the kit: {_KIT}." if is_original else ""
    if given is _Given.SAME:
        mend = _DELETE if wrapping.certain else _ONLY_ELSE
        return Level.TODO, _WRAPPED.format(counter=counter, optimizer=said, line=line) + mend.format(
            here=script.line(increment.call)
        ) + kit
    if given is _Given.NONE and not increment.conditional:
        return Level.TODO, _SKIPPED.format(counter=counter, optimizer=said, line=line) + kit
    return None


def _innermost(script: Script, optimizer: cst.BaseExpression) -> Sequence[cst.Call]:
    """Return what may construct the optimizer that wrappers are around; nothing if that is not known."""
    flow, optimizers = script.once(DataFlow), script.once(WrappedOptimizers)
    found: list[cst.Call] = []
    stack, seen = [optimizer], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, cst.IfExp):
            stack += [node.body, node.orelse]
        elif isinstance(node, cst.Call):
            is_wrapper = node in optimizers.constructions
            inside = (
                optimizers.inner(node) if is_wrapper else optimizers.summed_optimizer(node) or _around(script, node)
            )
            if inside is None:
                found.append(node)
            else:
                stack.append(inside)
        else:
            values = flow.values(node)
            if not values.complete:
                return ()
            stack += values.nodes
    return found


def _around(script: Script, call: cst.Call) -> cst.BaseExpression | None:
    """Return the optimizer that another than a loss-scale wrapper is put around; None for any other call."""
    return argument(call, 0, "opt") if function_name(script, call).split(".")[-1] in _AROUND else None


def _is_stock(script: Script, call: cst.Call) -> bool:
    name = script.name_of(call.func)
    return name.startswith("tensorflow.train.") and name.endswith("Optimizer")


def _is_berts(call: cst.Call) -> bool:
    return dotted(call.func).split(".")[-1] in _BERTS


def _is_kits(script: Script, call: cst.Call) -> bool:
    """Tell whether it is one of tfmp's, which count in apply_gradients."""
    return _is_berts(call) and script.name_of(call.func).startswith("tfmp.bert.")


def _counts(script: Script, construction: cst.Call) -> bool:
    """Tell whether a class of the script moves the counter in its own apply_gradients."""
    name = dotted(construction.func)
    for node in script.nodes(cst.Call):
        function = script.function_of(node)
        owner = next((above for above in script.ancestors(node) if isinstance(above, cst.ClassDef)), None)
        if function is None or owner is None or owner.name.value != name or function.name.value != "apply_gradients":
            continue
        target = method(node)[0] if not script.name_of(node.func) else argument(node, 0, "ref")
        is_assignment = dotted(node.func).split(".")[-1] in ("assign", "assign_add")
        if is_assignment and target is not None and dotted(target) == "global_step":
            return True
    return False


_IF_BOTH = "if this is run together with line {line}, "
_TWICE = "{counter} is counted twice: {optimizer}, which is given it on line {line}, moves it too. {mend}"
_DELETE_THIS = "Delete this increment."
_OR_LEAVE_OUT = "Delete this increment, or leave global_step out there."
_WRAPPED = (
    "{counter} is counted twice where a step is applied: {optimizer}, which is given it on line {line}, moves it by "
    "one for each applied step, and this increment comes before or after, as it happens. "
)
_DELETE = "Delete this increment on line {here}."
_ONLY_ELSE = "Make this increment, on line {here}, only where the optimizer is not wrapped."
_SKIPPED = (
    "this increment of {counter} counts skipped steps too: {optimizer} skips some. Write global_step={counter} in its "
    "call on line {line}, which counts applied steps, and delete this increment."
)
_BERT = (
    "this increment is right for BERT's own optimizers, which do not count, and wrong for any other; with loss scaling "
    f"it counts twice or counts skipped steps. The kit counts inside apply_gradients: {_KIT}."
)
