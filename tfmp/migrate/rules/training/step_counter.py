"""R10: scripts that increment global_step although their optimizer increments it too."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, dotted, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.global_step_updates import (
    GlobalStepUpdate,
    global_step_updates,
    is_run_with,
    is_same_counter,
)
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers, Wrapping
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R10"
_AROUND = ("CrossShardOptimizer", "enable_mixed_precision_graph_rewrite", "npu_tf_optimizer")
_BERTS = ("AdamWeightDecayOptimizer", "LAMBOptimizer")
_KIT = "import tfmp.bert as optimization (Google's: from tfmp.bert import google as optimization)"


class _Given(Enum):
    """The counter that an optimizer's step receives as `global_step`, compared with the one that is incremented."""

    SAME = 1
    OTHER = 2
    NONE = 3


class _Step(NamedTuple):
    """A step of an optimizer.

    Attributes:
        call: The call of `apply_gradients` or `minimize`.
        optimizer: The expression that the method is called on.
        given: The counter that the call receives.
        beside: Whether the call is in the same function as the increment.
    """

    call: cst.Call
    optimizer: cst.BaseExpression
    given: _Given
    beside: bool


class _Made(NamedTuple):
    """The calls that may construct an optimizer.

    Attributes:
        wrappers: Calls that construct a loss-scale wrapper.
        inner: Calls that construct an optimizer, whether or not a wrapper is around it.
        plain: Calls that construct an optimizer without a wrapper.
    """

    wrappers: Sequence[cst.Call]
    inner: Sequence[cst.Call]
    plain: Sequence[cst.Call]


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report steps that are counted twice, and counters that count skipped steps."""
    del options
    if "assign" not in script.text:
        return
    for update in global_step_updates(script):
        for step in _applies(script, update):
            found = _of_step(script, update, step)
            together = is_run_with(script, update, step.call) if found is not None else False
            if found is not None and (together or (together is None and step.beside)):
                level, message = found
                condition = _IF_BOTH.format(line=script.line(step.call))
                yield Finding(RULE, script.line(update.call), level, message if together else condition + message)
                break


def _applies(script: Script, update: GlobalStepUpdate) -> Iterator[_Step]:
    """Yield the optimizer steps in the function of an increment, and steps elsewhere that receive the same counter."""
    function = script.function_of(update.call)
    for call, owner in script.methods("apply_gradients", "minimize"):
        beside = function in (script.function_of(call), *script.ancestors(call))
        given = _given(script, update, call)
        if (beside or given is _Given.SAME) and not _is_super(owner) and not _is_apart(script, update, call):
            yield _Step(call, owner, given, beside)


def _is_apart(script: Script, update: GlobalStepUpdate, node: cst.CSTNode) -> bool:
    """Tell whether an increment and a node never run together."""
    flow = script.cached(DataFlow)
    return _is_everywhere(update, lambda move: flow.is_exclusive(move, node))


def _is_everywhere(update: GlobalStepUpdate, is_so: Callable[[cst.CSTNode], bool]) -> bool:
    """Tell whether a condition holds for every place that increments the counter."""
    return is_so(update.call) or all(is_so(move) for move in update.moves)


def _given(script: Script, update: GlobalStepUpdate, step: cst.Call) -> _Given:
    """Compare the `global_step` argument of a step with the counter of an increment."""
    given = argument(step, 1, "global_step")
    if given is not None:
        return _Given.SAME if is_same_counter(script, given, update.counter) else _Given.OTHER
    return _Given.OTHER if any(arg.star for arg in step.args) else _Given.NONE


def _is_super(owner: cst.BaseExpression) -> bool:
    return dotted(owner.func if isinstance(owner, cst.Call) else owner) == "super"


def _of_step(script: Script, update: GlobalStepUpdate, step: _Step) -> tuple[Level, str] | None:
    """Return the level and the message for an increment beside an optimizer's step; None if the pair is correct."""
    wrapping, made = script.cached(WrappedOptimizers).wrapping(step.optimizer), _made(script, update, step.optimizer)
    if wrapping is not None and not _is_unwrapped(script, update, step, (wrapping.call, *made.wrappers)):
        return _of_wrapped(script, update, step, wrapping, made)
    if step.given is not _Given.SAME:
        return None
    counting = [node for node in made.plain if _is_counting(script, node)]
    if counting and (len(counting) == len(made.plain) or any(_counts(script, node) for node in counting)):
        # LAMB needs global_step to correct its moments, and a wrapper in another branch needs it to count.
        is_needed = wrapping is not None or all(_is_kits(script, node) for node in made.plain)
        return Level.WRONG, _TWICE.format(
            counter=script.code(update.counter),
            optimizer=dotted(step.optimizer) or "the optimizer",
            line=script.line(step.call),
            mend=_DELETE_THIS if is_needed else _OR_LEAVE_OUT,
        )
    if wrapping is None and made.plain and all(_is_berts(node) for node in made.plain):
        return Level.NOTE, _BERT
    return None


def _is_unwrapped(script: Script, update: GlobalStepUpdate, step: _Step, wrappers: Sequence[cst.Call]) -> bool:
    """Tell whether the counter is incremented only where none of these wrappers is around the step's optimizer."""
    if all(_is_apart(script, update, wrapper) for wrapper in wrappers):
        return True
    flow, classes = script.cached(DataFlow), {_last_word(script, wrapper.func) for wrapper in wrappers}

    def is_asked(test: cst.BaseExpression) -> bool:
        """Tell whether a condition asks if the optimizer is an instance of the wrapper."""
        if not isinstance(test, cst.Call) or dotted(test.func) != "isinstance" or len(test.args) != 2:
            return False
        tested, of_class = (arg.value for arg in test.args)
        is_it = flow.is_same_name(tested, step.optimizer) and flow.bindings(tested) == flow.bindings(step.optimizer)
        return is_it and classes == {_last_word(script, of_class)}

    return _is_everywhere(
        update, lambda move: any(not answer and is_asked(test) for test, answer in flow.conditions.of(move))
    )


def _of_wrapped(
    script: Script, update: GlobalStepUpdate, step: _Step, wrapping: Wrapping, made: _Made
) -> tuple[Level, str] | None:
    """Return the level and the message for a step of a wrapped optimizer; None if the pair is correct."""
    words = {
        "counter": script.code(update.counter),
        "optimizer": script.cached(WrappedOptimizers).description(step.optimizer, wrapping),
        "line": script.line(step.call),
        "here": script.line(update.call),
    }
    kit = f" BERT's own way is the kit: {_KIT}." if any(_is_original(script, node) for node in made.inner) else ""
    if step.given is _Given.SAME:
        is_never_needed = wrapping.certain or (made.plain and all(_is_counting(script, node) for node in made.plain))
        mend = _DELETE if is_never_needed else _ONLY_ELSE
        return Level.WRONG, (_WRAPPED + mend).format(**words) + kit
    if step.given is _Given.NONE and not update.conditional:
        own = [node for node in made.plain if _is_original(script, node) and not _counts(script, node)]
        mend = _ELSE if own and not wrapping.certain else "delete this increment"
        return Level.WRONG, _SKIPPED.format(mend=mend, **words) + kit
    return None


def _made(script: Script, update: GlobalStepUpdate, optimizer: cst.BaseExpression) -> _Made:
    """Return the calls that may construct an optimizer where a counter is incremented.

    If the script does not show all of them, only the wrappers are returned.
    """
    flow, optimizers = script.cached(DataFlow), script.cached(WrappedOptimizers)
    wrappers: list[cst.Call] = []
    inner: list[cst.Call] = []
    plain: list[cst.Call] = []
    stack, seen, is_known = [(optimizer, False)], set(), True
    while stack:
        node, is_inside = stack.pop()
        if (node, is_inside) in seen or _is_apart(script, update, node):
            continue
        seen.add((node, is_inside))
        if isinstance(node, cst.IfExp):
            stack += [(node.body, is_inside), (node.orelse, is_inside)]
        elif not isinstance(node, cst.Call):
            values = flow.values(node)
            is_known &= values.complete
            stack += [(value, is_inside) for value in values.nodes]
        elif node in optimizers.constructions:
            wrappers.append(node)
            inside = optimizers.inner(node)
            is_known &= inside is not None
            stack += [(inside, True)] if inside is not None else []
        elif (inside := optimizers.distributed_optimizer(node) or _around(script, node)) is not None:
            stack.append((inside, is_inside))
        else:
            inner.append(node)
            plain += [] if is_inside else [node]
    return _Made(wrappers, inner, plain) if is_known else _Made(wrappers, (), ())


def _around(script: Script, call: cst.Call) -> cst.BaseExpression | None:
    """Return the optimizer inside a wrapper that does not scale the loss; None for any other call."""
    return argument(call, 0, "opt") if script.last_word(call) in _AROUND else None


def _is_counting(script: Script, call: cst.Call) -> bool:
    """Tell whether an optimizer is known to increment global_step itself."""
    return _is_stock(script, call) or _is_kits(script, call) or _counts(script, call)


def _is_stock(script: Script, call: cst.Call) -> bool:
    name = script.name_of(call.func)
    return name.startswith("tensorflow.train.") and name.endswith("Optimizer")


def _is_berts(call: cst.Call) -> bool:
    return dotted(call.func).split(".")[-1] in _BERTS


def _is_kits(script: Script, call: cst.Call) -> bool:
    """Tell whether this is an optimizer of `tfmp.bert`, which increments global_step in apply_gradients."""
    return _is_berts(call) and script.name_of(call.func).startswith("tfmp.bert.")


def _is_original(script: Script, call: cst.Call) -> bool:
    """Tell whether this is one of BERT's own optimizers, which do not increment global_step."""
    return _is_berts(call) and not _is_kits(script, call)


def _counts(script: Script, construction: cst.Call) -> bool:
    """Tell whether a class of the script increments global_step in its own apply_gradients."""
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


def _last_word(script: Script, node: cst.BaseExpression) -> str:
    return (script.name_of(node) or dotted(node)).split(".")[-1]


_IF_BOTH = "if this is run together with line {line}, "
_TWICE = "{counter} is counted twice: {optimizer}, which receives it on line {line}, increments it too. {mend}"
_DELETE_THIS = "Delete this increment."
_OR_LEAVE_OUT = "Delete this increment, or leave global_step out there."
_WRAPPED = (
    "{counter} is counted twice where a step is applied: {optimizer}, which receives it on line {line}, moves it by "
    "one for each applied step, and the order of the two increments is undefined. "
)
_DELETE = "Delete this increment on line {here}."
_ONLY_ELSE = "Make this increment, on line {here}, only where the optimizer is not wrapped."
_ELSE = "make this increment only where the optimizer is not wrapped"
_SKIPPED = (
    "this increment of {counter} counts skipped steps too: {optimizer} skips some. Write global_step={counter} in its "
    "call on line {line}, which counts applied steps, and {mend}."
)
_BERT = (
    "this increment is right for BERT's own optimizers, which do not count, and wrong for any other; with loss scaling "
    f"it counts twice or counts skipped steps. The kit counts inside apply_gradients: {_KIT}."
)
