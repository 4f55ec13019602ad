"""R7: names of `tf.keras.mixed_precision.experimental` become their names of today."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Use, literal_text, without_last_words
from tfmp.migrate.analysis.guarded_imports import is_guarded
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import V1_MODULE, TfVersion, detect_version
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, NeededImport, Options, Result

RULE = "R7"
_KERAS = "tensorflow.keras.mixed_precision"
_MODULE = f"{_KERAS}.experimental"
_RENAMED = {"set_policy": "set_global_policy", "global_policy": "global_policy", "Policy": "Policy"}
# A manager with the same rule as "dynamic" in Keras.
_DYNAMIC = "tfmp.ExponentialUpdateLossScaleManager(2**15, 2000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)"


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Rename the names whose successor is certain, and report the others."""
    del options
    uses = [use for use in script.uses if _plain(use.name).startswith(f"{_MODULE}.")]
    results = {use: list(_of_use(script, use)) for use in uses}
    in_full = [use for use in uses if not _plain(use.root).startswith(_MODULE)]
    imported = [use for use in uses if use not in in_full]
    for use in in_full:
        yield from results[use]
    nodes = dict.fromkeys(one.node for one in script.imports if f"{_plain(one.name)}.".startswith(f"{_MODULE}."))
    targets = {node: _targets(script, node) for node in nodes}
    unclear = any(isinstance(result, Finding) for use in imported for result in results[use])
    # The module is passed on as a whole, or an `except` binds its name again: some of its uses are not visible.
    unclear |= any(_plain(use.name) == _MODULE for use in script.uses) or any(
        is_guarded(script, node) for node in nodes
    )
    if all(targets.values()) and not unclear:
        yield from (result for use in imported for result in results[use])
        for node, found in targets.items():
            yield MovedNames(RULE, cst.ensure_type(node, cst.ImportFrom), found)
        return
    yield from (result for use in imported for result in results[use] if isinstance(result, Finding))
    for node in nodes:
        message = (
            "tf.keras has no mixed_precision.experimental any more: import tensorflow.keras.mixed_precision, whose"
        )
        names = ", ".join(_RENAMED.values())
        yield Finding(RULE, script.line(node), Level.FAILS, f"{message} names are {names}, and change what follows.")


def _plain(name: str) -> str:
    return name.replace("tensorflow.compat.v2.", "tensorflow.", 1)


def _targets(script: Script, node: cst.Import | cst.ImportFrom) -> dict[str, tuple[str, str]]:
    """Return the new module and name for each imported name; empty if one of them has no successor."""
    if isinstance(node, cst.Import) or isinstance(node.names, cst.ImportStar):
        return {}
    targets = {}
    for name in (_plain(one.name) for one in script.imports if one.node is node):
        module, _, word = name.rpartition(".")
        if name == _MODULE:
            targets[word] = ("tensorflow.keras", "mixed_precision")
        elif module == _MODULE and word in _RENAMED:
            targets[word] = (_KERAS, _RENAMED[word])
        elif name == f"{_MODULE}.LossScaleOptimizer":
            targets[word] = ("tfmp", word)
        elif module == _MODULE:
            return {}
    return targets


def _of_use(script: Script, use: Use) -> Iterator[Result]:
    """Yield the edits of one use, or a finding if its successor is not certain."""
    name = _plain(use.name)[len(_MODULE) + 1 :]
    call = script.call_of(use.node)
    if name == "LossScaleOptimizer":
        yield from _optimizer(script, use, call)
    elif name == "Policy" and call is not None and len(call.args) != 1:
        yield from _policy(script, use, call)
    elif name not in _RENAMED:
        advice = "write layer.dtype_policy" if name == "get_layer_policy" else "see tf.keras.mixed_precision"
        yield _todo(script, use, f"tf.keras has no mixed_precision.experimental.{name} any more: {advice}.")
    elif call is not None and any(literal_text(arg.value) in ("infer", "infer_with_float32_vars") for arg in call.args):
        yield _todo(script, use, f"Keras has no policy {literal_text(call.args[0].value)!r} any more: write 'float32'.")
    else:
        yield from _renamed(script, use, _RENAMED[name])


def _policy(script: Script, use: Use, call: cst.Call) -> Iterator[Result]:
    """Remove the loss scale of a policy if Keras now scales that way itself; report any other loss scale."""
    scale = call.args[1] if len(call.args) == 2 else None
    if scale is None or not _is_keyword(scale, "loss_scale") or call.args[0].keyword or call.args[0].star:
        yield _todo(
            script, use, "Policy takes only a name now: write Policy(name), and scale the loss in the optimizer."
        )
    elif literal_text(scale.value) == "dynamic" and literal_text(call.args[0].value) == "mixed_float16":
        yield from _renamed(script, use, "Policy")
        yield Edit(RULE, script.span(call.args[0].value)[1], script.span(scale.value)[1], "")
    elif literal_text(scale.value) == "dynamic":
        given = script.code(call.args[0].value)
        line = f"`opt = tfmp.LossScaleOptimizer(opt, {_DYNAMIC})`"
        message = (
            f"compile scales the loss itself only for 'mixed_float16': write Policy({given}), and for another policy"
        )
        yield _todo(script, use, f"{message} wrap the optimizer to scale: {line}.")
    else:
        given = script.code(scale.value)
        line = f"`opt = tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager({given}))`"
        if not literal_text(scale.value) and not isinstance(scale.value, cst.Integer | cst.Float):
            line = f"if {given} is a number, {line}; if it is 'dynamic', write nothing: compile scales the loss itself"
        yield _todo(
            script, use, f"Policy has no loss scale any more: write Policy(name), and wrap the optimizer: {line}."
        )


def _optimizer(script: Script, use: Use, call: cst.Call | None) -> Iterator[Result]:
    """Give the wrapper the manager that follows the rule of "dynamic"; report any other loss scale."""
    if call is None:
        yield from _optimizer_type(script, use)
        return
    scale = call.args[1] if len(call.args) == 2 else None
    known = scale is not None and _is_keyword(scale, "loss_scale") and not call.args[0].keyword
    if scale is None or not known or call.args[0].star or literal_text(scale.value) != "dynamic":
        given = script.code(scale.value) if scale is not None and known else "scale"
        yield _todo(
            script,
            use,
            f"LossScaleOptimizer takes a manager: write tfmp.LossScaleOptimizer(opt, manager) with {_DYNAMIC} for "
            f"'dynamic', tfmp.FixedLossScaleManager({given}) for a number.",
        )
        return
    if use.node is not call.func or _plain(use.root) != f"{_MODULE}.LossScaleOptimizer":
        yield Edit(RULE, *script.span(use.node), "tfmp.LossScaleOptimizer")
    manager = f"loss_scale_manager={_DYNAMIC}" if scale.keyword else _DYNAMIC
    start = script.span(scale.keyword)[0] if scale.keyword else script.span(scale.value)[0]
    yield Edit(RULE, start, script.span(scale.value)[1], manager)
    yield NeededImport(RULE, "tfmp")


def _optimizer_type(script: Script, use: Use) -> Iterator[Result]:
    """Keep an `isinstance` check of Keras' own type, of which the wrappers of tfmp are subclasses."""
    asked = any(
        isinstance(above, cst.Call) and cst.ensure_type(above, cst.Call).func.deep_equals(cst.Name("isinstance"))
        for above in script.ancestors(use.node)
    )
    if asked and not _plain(use.root).startswith(_MODULE):
        yield from _renamed(script, use, "LossScaleOptimizer")
        return
    yield _todo(
        script,
        use,
        "tf.keras has no mixed_precision.experimental.LossScaleOptimizer any more: write tfmp.LossScaleOptimizer, "
        "which takes a manager.",
    )


def _renamed(script: Script, use: Use, name: str) -> Iterator[Result]:
    """Yield the edit that writes the new name of a use."""
    node = use.node
    root = _plain(use.root)
    if root.startswith(f"{_MODULE}."):
        return  # The import statement is rewritten, and the name that it binds stays.
    if root == _MODULE:
        if isinstance(node, cst.Attribute) and node.attr.value != name:
            yield Edit(RULE, *script.span(node.attr), name)
        return
    words = use.raw[len(_raw_root(use)) :].strip(".").split(".")
    if use.root != "tensorflow" and _is_old(script, use):
        yield _todo(
            script, use, f"write tf.compat.v2.keras.mixed_precision.{name}: tf.compat.v1.keras has no policies in 2.15."
        )
    elif use.root == "tensorflow" and words[0] == "keras" and _is_old(script, use):
        start = script.span(without_last_words(node, len(words)))[1]
        yield Edit(RULE, start, script.span(node)[1], ".".join(["", "compat", "v2", *words[:-2], name]))
    else:
        above, last = cst.ensure_type(without_last_words(node, 1), cst.Attribute), cst.ensure_type(node, cst.Attribute)
        yield Edit(RULE, script.span(above.attr)[0], script.span(last.attr)[1], name)


def _raw_root(use: Use) -> str:
    """Return the full name of the imported thing that a use starts with, as the script imports it."""
    return use.raw[: len(use.raw) - len(use.name[len(use.root) :])]


def _is_old(script: Script, use: Use) -> bool:
    """Tell whether a use is a name of `tf.compat.v1` now, or after R1: its Keras has no policies in 2.15."""
    return _raw_root(use).startswith(V1_MODULE) or script.cached(detect_version).version is TfVersion.V1


def _todo(script: Script, use: Use, message: str) -> Finding:
    return Finding(RULE, script.line(use.node), Level.FAILS, message)


def _is_keyword(arg: cst.Arg, name: str) -> bool:
    return not arg.star and (arg.keyword is None or arg.keyword.value == name)
