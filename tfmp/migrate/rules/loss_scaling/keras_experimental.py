"""R7: names of `tf.keras.mixed_precision.experimental` become their names of today."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Use, dotted, first_word, without_last_words
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import V1_MODULE, TfVersion, detect_version, is_guarded
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, Result

RULE = "R7"
_KERAS = "tensorflow.keras.mixed_precision"
_MODULE = f"{_KERAS}.experimental"
_RENAMED = {"set_policy": "set_global_policy", "global_policy": "global_policy", "Policy": "Policy"}
# The new module and name of each name that an import may take.
_TARGETS = {
    _MODULE: ("tensorflow.keras", "mixed_precision"),
    **{f"{_MODULE}.{old}": (_KERAS, new) for old, new in _RENAMED.items()},
}
_GONE = "tf.keras.mixed_precision.experimental is not in TensorFlow 2.15"
_DYNAMIC = "tfmp.ExponentialUpdateLossScaleManager(2**15, 2000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)"
_OPTIMIZER = (
    f"{_GONE}. Write tfmp.LossScaleOptimizer(opt, manager) for its LossScaleOptimizer. The manager is {_DYNAMIC} for "
    "'dynamic', and tfmp.FixedLossScaleManager(scale) for a number. tf.keras.mixed_precision.LossScaleOptimizer is the "
    "type for isinstance checks."
)
_POLICY = (
    "Policy takes only a name in TensorFlow 2.15, and no loss scale. Write Policy(name). For 'mixed_float16', compile "
    f"scales the loss itself, as 'dynamic' did. For any other policy or scale, wrap the optimizer: "
    f"`opt = tfmp.LossScaleOptimizer(opt, {_DYNAMIC})`, or with tfmp.FixedLossScaleManager(scale) for a number."
)
_OTHER = f"{_GONE}. For get_layer_policy(layer) write layer.dtype_policy; for other names see tf.keras.mixed_precision."
_IMPORT = (
    f"{_GONE}. Use tf.keras.mixed_precision in its place, or tf.compat.v2.keras.mixed_precision in a script that "
    "imports tensorflow.compat.v1 as tf, write set_global_policy for set_policy, and change the reported uses."
)


def rewrite(script: Script) -> Iterator[Result]:
    """Rename the names whose successor is certain, and report the others."""
    problems = {use: _problem(script, use) for use in script.uses if _is_below(use.name)}
    # An import stays as long as a person must change uses of it, so that these are found again.
    is_unclear = any(problem for use, problem in problems.items() if _is_imported(use))
    for use, problem in problems.items():
        if problem:
            yield Finding(RULE, script.line(use.node), Level.FAILS, problem)
        elif not (is_unclear and _is_imported(use)):
            yield from _renamed(script, use)
    for one in script.imports:
        stays = is_unclear or isinstance(one.node, cst.Import) or is_guarded(script, one.node)
        target = _TARGETS.get(_plain(one.name)) if one.bound and not stays else None
        if target is not None:
            yield MovedNames(RULE, cst.ensure_type(one.node, cst.ImportFrom), {one.name.rpartition(".")[2]: target})
        elif _is_below(one.name):
            yield Finding(RULE, script.line(one.node), Level.FAILS, _IMPORT)


def _is_below(name: str) -> bool:
    """Tell whether a full name is that of the module, or of a name in it."""
    return f"{_plain(name)}.".startswith(f"{_MODULE}.")


def _plain(name: str) -> str:
    return name.replace("tensorflow.compat.v2.", "tensorflow.", 1)


def _is_imported(use: Use) -> bool:
    """Tell whether a use starts at an imported name of the module, or at the module itself."""
    return _plain(use.root).startswith(_MODULE)


def _problem(script: Script, use: Use) -> str:
    """Return the message for a use that a person must change; empty if it can be renamed."""
    name = _plain(use.name)[len(_MODULE) + 1 :]
    call = script.call_of(use.node)
    if name == "LossScaleOptimizer":
        return _OPTIMIZER
    if name not in _RENAMED:
        return _OTHER
    if name == "Policy" and call is not None and len(call.args) != 1:
        return _POLICY
    return _IMPORT if use.root != "tensorflow" and not _is_imported(use) and _is_old(script, use) else ""


def _renamed(script: Script, use: Use) -> Iterator[Edit]:
    """Yield the edit that writes the new name of a use."""
    node, name = use.node, _RENAMED[_plain(use.name).rpartition(".")[2]]
    if _plain(use.root) == _MODULE:
        if isinstance(node, cst.Attribute) and node.attr.value != name:
            yield Edit(RULE, *script.span(node.attr), name)
    elif not _is_imported(use):
        before = dotted(without_last_words(node, 2))
        module = f"{first_word(node)}.compat.v2.keras.mixed_precision" if _is_old(script, use) else before
        yield Edit(RULE, *script.span(node), f"{module}.{name}")


def _is_old(script: Script, use: Use) -> bool:
    """Tell whether a use is a name of `tf.compat.v1` now, or after R1: its Keras has no policies in 2.15."""
    is_v2 = f"{use.raw}.".startswith("tensorflow.compat.v2.")
    return not is_v2 and (use.raw.startswith(V1_MODULE) or script.cached(detect_version).version is TfVersion.V1)
