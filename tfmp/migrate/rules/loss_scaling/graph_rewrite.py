"""R6: loss scales of TensorFlow's graph rewrite are kept, or become managers of tfmp with `--to-tfmp`."""

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, literal_text
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, Finding, Level, NeededImport, Options, Result

RULE = "R6"
_MODULES = ("tensorflow.train.experimental", "tensorflow.mixed_precision.experimental", "tensorflow.mixed_precision")
_WRAPPER, _DYNAMIC, _FIXED = "MixedPrecisionLossScaleOptimizer", "DynamicLossScale", "FixedLossScale"
_REWRITES = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
_DEFAULTS = {
    _DYNAMIC: {"initial_loss_scale": "2**15", "increment_period": "2000", "multiplier": "2.0"},
    _FIXED: {"loss_scale_value": ""},
}
# An argument whose code may be written twice: a number, a name, or a power.
_PLAIN = re.compile(r"(\w+ *= *)?[\w.]+( ?\*\* ?\w+)?,? *")
_NAMES = (_WRAPPER, _DYNAMIC, _FIXED, "LossScale", *_REWRITES)


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Note the names that are kept. With `--to-tfmp`, rewrite each wrapper together with its loss scale."""
    uses = [use for use in script.uses if _name(use.name)]
    changed: set[cst.CSTNode] = set()
    calls = [script.call_of(use.node) for use in uses if _name(use.name) == _WRAPPER]
    for call in filter(None, calls) if options.to_tfmp else ():
        edits = _pair(script, call) if None not in calls else {}
        changed.update(edits)
        yield from edits.values()
        yield NeededImport(RULE, "tfmp") if edits else Finding(RULE, script.line(call), Level.NOTE, _NOT_PLAIN)
    kept = [use for use in uses if use.node not in changed]
    names = dict.fromkeys(_name(use.name) for use in kept)
    if kept:
        message = _KEPT + (_CASTS if not names.keys().isdisjoint(_REWRITES) else "")
        message += _OPTION if _WRAPPER in names and not options.to_tfmp else ""
        yield Finding(RULE, script.line(kept[0].node), Level.NOTE, message, f"The script uses {', '.join(names)}.")


def _name(name: str) -> str:
    module, _, word = name.rpartition(".")
    return word if module in _MODULES and word in _NAMES else ""


def _pair(script: Script, call: cst.Call) -> dict[cst.CSTNode, Edit]:
    """Return the edits of a wrapper and of its loss scale, by the nodes that they replace; empty if it is not plain."""
    scale = argument(call, 1, "loss_scale")
    made = _assigned(script, scale) if isinstance(scale, cst.Name) else scale
    manager = _manager(script, made) if made is not None else ""
    if made is None or not manager:
        return {}
    replaced = made.func if isinstance(made, cst.Call) else made
    edits: dict[cst.CSTNode, Edit] = {call.func: Edit(RULE, *script.span(call.func), "tfmp.LossScaleOptimizer")}
    edits[replaced] = Edit(RULE, *script.span(made), manager)
    for arg in call.args:
        if arg.keyword is not None and arg.value is scale:
            edits[arg.keyword] = Edit(RULE, *script.span(arg.keyword), "loss_scale_manager")
    return edits


def _assigned(script: Script, name: cst.Name) -> cst.BaseExpression | None:
    """Return the value of a variable that is assigned once and read nowhere else; None for any other name."""
    values = script.cached(DataFlow).values(name).nodes
    above = script.parent(values[0]) if len(values) == 1 else None
    target = above.targets[0].target if isinstance(above, cst.Assign) else None
    is_only = isinstance(target, cst.Name) and script.reads_of(target) == (name,)
    return values[0] if is_only and script.function_of(values[0]) is script.function_of(name) else None


def _manager(script: Script, made: cst.BaseExpression) -> str:
    """Return the code of the manager that follows the rule of a loss scale of TensorFlow; empty if it is not plain."""
    name = _DYNAMIC if literal_text(made) == "dynamic" else ""
    args: Sequence[cst.Arg] = ()
    if isinstance(made, cst.Call):
        name, args = _name(script.name_of(made.func)), made.args
    # Another rule may edit an imported name, and two edits must not overlap.
    are_plain = all(_PLAIN.fullmatch(script.code(arg)) and not script.name_of(arg.value) for arg in args)
    if not are_plain or "#" in script.code(made):
        return ""
    values = dict(_DEFAULTS[name]) if name in _DEFAULTS else {}
    for keyword, arg in zip(tuple(values), args, strict=False):
        values[arg.keyword.value if arg.keyword else keyword] = script.code(arg.value)
    if name == _FIXED and len(args) == len(values) == 1:
        return f"tfmp.FixedLossScaleManager({values['loss_scale_value']})"
    if name == _DYNAMIC and len(values) == 3:
        start, period, factor = values.values()
        inverse = "0.5" if factor == "2.0" else f"1 / {factor}"
        return f"tfmp.ExponentialUpdateLossScaleManager({start}, {period}, 1, {factor}, {inverse})"
    return ""


_KEPT = "TensorFlow's own loss scaling is kept as it is: TensorFlow 2 has it in tensorflow.compat.v1."
_CASTS = " The graph rewrite also casts operations to float16, on a GPU only; it is kept with --to-tfmp too."
_OPTION = " With --to-tfmp, MixedPrecisionLossScaleOptimizer becomes tfmp.LossScaleOptimizer."
_NOT_PLAIN = (
    "MixedPrecisionLossScaleOptimizer is kept, because --to-tfmp replaces it only together with its loss scale, and "
    "only if the script constructs that for this wrapper alone, from plain numbers and names. To use tfmp here, write "
    "tfmp.LossScaleOptimizer(optimizer, manager) by hand, with a manager such as tfmp.FixedLossScaleManager(128)."
)
