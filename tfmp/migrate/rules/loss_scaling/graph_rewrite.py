"""R6: loss scales of TensorFlow's graph rewrite are kept, or become managers of tfmp with `--to-tfmp`."""

import ast
import re
from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, Finding, Level, NeededImport, Options, Result

RULE = "R6"
_MODULES = ("tensorflow.train.experimental", "tensorflow.mixed_precision.experimental", "tensorflow.mixed_precision")
_WRAPPER = "MixedPrecisionLossScaleOptimizer"
_REWRITES = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
_DYNAMIC, _FIXED = "DynamicLossScale", "FixedLossScale"
_NAMES = (_DYNAMIC, _FIXED, "LossScale", _WRAPPER, *_REWRITES)
# The arguments of DynamicLossScale, with their default values.
_DEFAULTS = {"initial_loss_scale": "2**15", "increment_period": "2000", "multiplier": "2.0"}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?")


class _KeptError(Exception):
    """A wrapper and its loss scale stay unchanged; the message gives the reason."""


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Note the names that are kept. With `--to-tfmp`, rewrite each wrapper together with its loss scale."""
    uses = [use for use in script.uses if _name(use.name)]
    changed: set[cst.CSTNode] = set()
    for call in _wrappers(script) if options.to_tfmp else ():
        try:
            edits = _pair(script, call)
        except _KeptError as kept:
            message = f"kept: {_WRAPPER} changes together with its loss scale or not at all, and {kept}."
            yield Finding(RULE, script.line(call), Level.NOTE, message)
            continue
        yield from edits.values()
        yield NeededImport(RULE, "tfmp")
        changed.update(edits)
    left = [use for use in uses if use.node not in changed]
    if left:
        names = list(dict.fromkeys(_name(use.name) for use in left))
        yield Finding(RULE, script.line(left[0].node), Level.NOTE, _message(names, options))


def _name(name: str) -> str:
    module, _, word = name.rpartition(".")
    return word if module in _MODULES and word in _NAMES else ""


def _message(names: list[str], options: Options) -> str:
    kept = f"kept: {', '.join(names)} {'is' if len(names) == 1 else 'are'} in tensorflow.compat.v1 of TensorFlow 2 too"
    if any(name in _REWRITES for name in names):
        kept += "; the rewrite acts on GPU only"
        kept += ", and as it casts the graph too, it does not become tfmp's" if options.to_tfmp else ""
    return f"{kept}." if options.to_tfmp or _WRAPPER not in names else f"{kept}; --to-tfmp makes the wrapper tfmp's."


def _wrappers(script: Script) -> Iterator[cst.Call]:
    return (call for call in script.nodes(cst.Call) if _name(script.name_of(call.func)) == _WRAPPER)


def _pair(script: Script, call: cst.Call) -> dict[cst.CSTNode, Edit]:
    """Return the edits of a wrapper and of its loss scale, keyed by the nodes that they replace."""
    given = [arg for arg in call.args if not arg.star and arg.keyword and arg.keyword.value == "loss_scale"]
    if not given and len(call.args) > 1 and not call.args[1].star and call.args[1].keyword is None:
        given = [call.args[1]]
    if not given or any(arg.star for arg in call.args):
        raise _KeptError("the script does not show its loss scale")
    if any(_name(use.name) == _WRAPPER and script.call_of(use.node) is None for use in script.uses):
        raise _KeptError(f"the script also uses {_WRAPPER} without calling it")
    scale = given[0]
    edits: dict[cst.CSTNode, Edit] = {call.func: Edit(RULE, *script.span(call.func), "tfmp.LossScaleOptimizer")}
    if scale.keyword is not None:
        edits[scale.keyword] = Edit(RULE, *script.span(scale.keyword), "loss_scale_manager")
    if isinstance(scale.value, cst.SimpleString) and ast.literal_eval(scale.value.value) == "dynamic":
        edits[scale.value] = Edit(RULE, *script.span(scale.value), _exponential(script, ()))
        return edits
    made = _assigned(script, scale.value) if isinstance(scale.value, cst.Name) else scale.value
    edits[made.func if isinstance(made, cst.Call) else made] = Edit(RULE, *script.span(made), _manager(script, made))
    return edits


def _assigned(script: Script, name: cst.Name) -> cst.BaseExpression:
    """Return the value of a variable that is assigned once in the same function and used nowhere else."""
    function = script.function_of(name)
    same = [
        other
        for other in script.nodes(cst.Name)
        if other.value == name.value and (function is None or function in script.ancestors(other))
    ]
    others = [other for other in same if other is not name and not script.is_label(other)]
    targets = [target for target in map(script.parent, others) if isinstance(target, cst.AssignTarget)]
    if not targets or script.function_of(targets[0]) is not function:
        raise _KeptError(f"the script does not show what {name.value} is")
    if len(others) > 1:
        line = next(script.line(other) for other in others if script.parent(other) is not targets[0])
        raise _KeptError(f"line {line} also uses {name.value}")
    assign = script.parent(targets[0])
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        raise _KeptError(f"the script does not show what {name.value} is")
    return assign.value


def _manager(script: Script, made: cst.BaseExpression) -> str:
    """Return the code of the manager that follows the same rule as a loss scale of TensorFlow."""
    name = _name(script.name_of(made.func)) if isinstance(made, cst.Call) else ""
    if not isinstance(made, cst.Call) or name not in (_DYNAMIC, _FIXED):
        raise _KeptError("the script does not show its loss scale")
    text = _text(script, made)
    if "#" in text or any(arg.star for arg in made.args):
        raise _KeptError(f"the arguments of {name} cannot be taken over: there are comments, or a * in them")
    start, end = script.span(made)
    if any(start < script.span(use.node)[0] < end for use in script.uses if use.node is not made.func):
        # Another rule may edit this argument, and two edits must not overlap.
        raise _KeptError(f"an argument of {name} uses what is imported: give it a name first")
    if name == _DYNAMIC:
        return _exponential(script, made.args)
    if len(made.args) != 1 or (made.args[0].keyword and made.args[0].keyword.value != "loss_scale_value"):
        raise _KeptError(f"{name} takes one argument")
    return f"tfmp.FixedLossScaleManager({_text(script, made.args[0].value)})"


def _exponential(script: Script, args: Sequence[cst.Arg]) -> str:
    """Return the code of the manager for `DynamicLossScale(*args)`."""
    values = dict(_DEFAULTS)
    for name, arg in zip(_DEFAULTS, args, strict=False):
        values[arg.keyword.value if arg.keyword else name] = _text(script, arg.value)
    multiplier = values["multiplier"]
    if len(args) > len(_DEFAULTS) or values.keys() != _DEFAULTS.keys():
        raise _KeptError(f"{_DYNAMIC} takes {', '.join(_DEFAULTS)}")
    if multiplier.isidentifier():
        inverse = f"1 / {multiplier}"
    elif _NUMBER.fullmatch(multiplier) and float(multiplier) > 1:
        inverse = repr(1 / float(multiplier))
    else:
        raise _KeptError(f"1 / ({multiplier}) would compute its multiplier twice: give that a name first")
    start, period = values["initial_loss_scale"], values["increment_period"]
    return f"tfmp.ExponentialUpdateLossScaleManager({start}, {period}, 1, {multiplier}, {inverse})"


def _text(script: Script, node: cst.CSTNode) -> str:
    start, end = script.span(node)
    return script.text[start:end]
