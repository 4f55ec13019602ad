"""Tells whether an optimizer increments the global step that its apply_gradients receives."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import argument, dotted, method
from tfmp.migrate.analysis.script import Script

_BERTS = ("AdamWeightDecayOptimizer", "LAMBOptimizer")
_STOCK = ("tensorflow.train.", "tensorflow.python.training.")


def counts(script: Script, node: cst.BaseExpression, seen: frozenset[cst.CSTNode] = frozenset()) -> bool | None:
    """Tell whether the optimizers of a class increment global_step; None if the script does not show it.

    A class of the script is judged by its code, any other by its name: those of tf.train and of `tfmp.bert` do, and
    BERT's own classes do not. The classes in `seen` are passed over, as some may be their own bases.
    """
    own = [each for each in script.nodes(cst.ClassDef) if each.name.value == dotted(node) and each not in seen]
    if len(own) == 1:
        bases = [base.value for base in own[0].bases]
        inherited = _any([counts(script, base, seen | {own[0]}) for base in bases] or [None])
        methods = (
            each for each in script.nodes(cst.FunctionDef) if script.parent(script.parent(each) or each) is own[0]
        )
        function = next((each for each in methods if each.name.value == "apply_gradients"), None)
        return inherited if function is None else _any([*_answers(script, function, [*map(dotted, bases)], inherited)])
    name = script.name_of(node) or dotted(node)
    last = name.split(".")[-1]
    if last in _BERTS:
        return name.startswith("tfmp.bert.")
    return True if name.startswith(_STOCK) and last.endswith("Optimizer") else None


def is_berts(script: Script, construction: cst.Call) -> bool:
    """Tell whether an optimizer is one of BERT's, which is not tfmp's."""
    return script.last_word(construction) in _BERTS and not script.name_of(construction.func).startswith("tfmp.")


def _any(answers: list[bool | None]) -> bool | None:
    return True if True in answers else None if None in answers else False


def _answers(
    script: Script, function: cst.FunctionDef, bases: list[str], inherited: bool | None
) -> Iterator[bool | None]:
    """Yield whether each call in `apply_gradients` that uses the global step increments it; None if it may."""
    params = [param.name.value for param in function.params.params]
    step = params[2] if len(params) > 2 else "global_step"
    for call in (each for each in script.nodes(cst.Call) if function in script.ancestors(each)):
        owner, name = method(call)
        last = script.last_word(call) or name
        if last in ("assign", "assign_add"):
            yield dotted(argument(call, 0, "ref") if script.name_of(call.func) else owner) == step
        elif name == "apply_gradients" and any(arg.star or dotted(arg.value) == step for arg in call.args):
            is_super = isinstance(owner, cst.Call) and dotted(owner.func) == "super"
            yield inherited if is_super or dotted(owner) in bases else None
        elif any(dotted(arg.value) == step for arg in call.args):
            is_read = script.name_of(call.func).startswith("tensorflow.")
            yield False if is_read or (isinstance(call.func, cst.Name) and script.is_builtin(call.func)) else None
