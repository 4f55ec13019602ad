"""R1: a script of TensorFlow 1 imports `tensorflow.compat.v1`, and starts with `disable_v2_behavior()`."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, Use, dotted, first_word, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import (
    V1_MODULE,
    DetectedVersion,
    TfVersion,
    asks_for_main,
    detect_version,
    imported_word,
    imports_rebinding_tensorflow,
    is_explicit_v1,
    is_run,
    name_in_tensorflow,
    uses_and_imports,
    v1_alias,
    v1_aliases,
)
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, Result
from tfmp.migrate.tables.api_names import Standing, differs, standing
from tfmp.migrate.tables.changed_positions import FIRST_CHANGED

RULE = "R1"
_CALL = "disable_v2_behavior()"
_EAGER = frozenset(("enable_eager_execution", "enable_v2_behavior"))
_STAR = (
    f"A star import of TensorFlow hides which names are of TensorFlow 1. Write `import {V1_MODULE} as tf` in its place "
    "and tf. before each of them, and run the rewriter again."
)
_NEW = "The script is written for TensorFlow 2, so the rewriter leaves its imports and its behavior alone."
_MIXED = (
    "The script uses names of both TensorFlow 1 and TensorFlow 2, so the rewriter leaves its imports alone, and it "
    "fails at the names that the installed version lacks. Write tf.compat.v1 in front of the names of TensorFlow 1, or "
    f"`import {V1_MODULE} as tf` and tf.compat.v2 in front of those of TensorFlow 2."
)
_UNCLEAR = (
    "The rewriter cannot tell whether the script was written for TensorFlow 1 or 2, and leaves it alone. Its calls "
    "take the same arguments in both."
)
_TWO_MEANINGS = (
    "The rewriter cannot tell whether the script was written for TensorFlow 1 or 2, and leaves it alone. But a call "
    "gives arguments by position whose order differs between the two. If the script is for TensorFlow 1, write "
    f"`import {V1_MODULE} as tf`; if it is for TensorFlow 2, give the arguments by keyword."
)
_REBOUND = (
    "The script uses names of TensorFlow 1, but an import of a submodule binds the name tensorflow to TensorFlow 2. "
    f"Write `import {V1_MODULE} as tf`, and tf in place of tensorflow below."
)
_IS_EAGER = (
    "The script turns on eager execution, so the rewriter does not turn on TensorFlow 1's behavior. If the script "
    "trains in a session, it fails: write tf.disable_v2_behavior() in its place."
)
_ONLY_GRAPHS = (
    "tf.disable_eager_execution() alone keeps TensorFlow 2's resource variables and control flow. Write "
    "tf.disable_v2_behavior() in its place for TensorFlow 1's behavior, with the names and fetches of the script."
)
_KERAS = (
    "The rewriter cannot tell whether Keras is to train in graphs, as in TensorFlow 1, or eagerly. Below the imports, "
    f"write tf.compat.v1.{_CALL} for graphs, or tf.compat.v1.enable_eager_execution()."
)
_NO_IMPORT = (
    "The script is run, and needs the behavior of TensorFlow 1, but does not import tensorflow at its top. Call "
    f"{V1_MODULE}.{_CALL} before all else."
)


def rewrite(script: Script) -> Iterator[Result]:
    """Give a script of TensorFlow 1 the names of `tf.compat.v1` and the behavior of TensorFlow 1."""
    detected = script.cached(detect_version)
    yield from _stars(script, detected)
    if detected.version is TfVersion.V1:
        yield from _imports(script)
    if detected.version in (TfVersion.V1, TfVersion.COMPAT_V1):
        yield from _behavior(script, detected)
    elif detected.version is TfVersion.AMBIGUOUS:
        yield _unclear(script)
    elif detected.version in (TfVersion.V2, TfVersion.MIXED):
        yield _of_tensorflow_2(script, detected)


def _stars(script: Script, detected: DetectedVersion) -> Iterator[Finding]:
    """Report star imports whose names belong to TensorFlow 1, or have to come from `tf.compat.v1`."""
    for one in script.imports:
        if one.bound or not f"{one.raw}.".startswith("tensorflow."):
            continue
        module, is_plain = name_in_tensorflow(one.name), not one.raw.startswith(V1_MODULE)
        full = {name: f"{module}.{name}".lstrip(".") for name in _unbound(script)}
        names = [
            each
            for each, name in full.items()
            if each.partition(".")[0] == "contrib" or (is_plain and standing(name) is Standing.OLD)
        ]
        if names or (is_plain and detected.version is TfVersion.V1 and (not module or differs(module))):
            shown = [f"{name} in line {_unbound(script)[name]}" for name in names]
            detail = f"The script uses {', '.join(shown)}." if shown else ""
            yield Finding(RULE, script.line(one.node), Level.FAILS, _STAR, detail)


def _unbound(script: Script) -> dict[str, int]:
    """Return the dotted names that start at a word which only a star import may bind, each with its first line."""
    nodes = [script.whole_name(root) for root in script.scopes.unbound()]
    places = sorted((script.line(node), dotted(node)) for node in nodes)
    found: dict[str, int] = {}
    for line, name in places:
        found.setdefault(name, line)
    return found


def _of_tensorflow_2(script: Script, detected: DetectedVersion) -> Finding:
    """Report that a script is left alone because it uses names of TensorFlow 2."""
    new = min(detected.new, key=lambda mark: script.line(mark.node))
    if detected.version is TfVersion.V2:
        return Finding(RULE, script.line(new.node), Level.NOTE, _NEW, f"It uses {new.shown}.")
    old = min(detected.old, key=lambda mark: script.line(mark.node))
    detail = f"{new.shown} is of TensorFlow 2, and {old.shown} in line {script.line(old.node)} is of TensorFlow 1."
    return Finding(RULE, script.line(new.node), Level.FAILS, _MIXED, detail)


def _unclear(script: Script) -> Finding:
    """Report a script that does not show which TensorFlow it was written for."""
    changed = next((use for use in script.uses if _means_two_things(script, use)), None)
    if changed is None:
        return Finding(RULE, _first_import(script), Level.NOTE, _UNCLEAR)
    detail = f"The first such call is of tf.{name_in_tensorflow(changed.name)}."
    return Finding(RULE, script.line(changed.node), Level.WRONG, _TWO_MEANINGS, detail)


def _means_two_things(script: Script, use: Use) -> bool:
    """Tell whether a positional argument of a call has another meaning in TensorFlow 2."""
    first, call = FIRST_CHANGED.get(name_in_tensorflow(use.name)), script.call_of(use.node)
    if first is None or call is None:
        return False
    return sum(arg.keyword is None and not arg.star for arg in call.args) > first


def _imports(script: Script) -> Iterator[Result]:
    """Replace the imports whose names differ between TensorFlow 1 and 2."""
    yield from _only_submodules(script)
    for one in script.imports:
        name = name_in_tensorflow(one.raw)
        if one.raw == "tensorflow" and one.bound not in ("", *script.cached(v1_aliases)):
            yield _of_tensorflow(script, one)
        elif one.alias is None or not one.raw.startswith("tensorflow.") or not differs(name):
            continue
        elif isinstance(one.node, cst.ImportFrom):
            module, _, word = name.rpartition(".")
            # `tf.app.flags` cannot be imported below `tf.compat.v1`; `tf.compat.v1.flags` is the same module.
            target = f"{V1_MODULE}.{'flags' if module == 'app.flags' else module}".rstrip(".")
            yield MovedNames(RULE, one.node, {word: (target, word)})
        elif one.alias.asname is not None:
            yield Edit(RULE, *script.span(one.alias.name), f"{V1_MODULE}.{name}")


def _only_submodules(script: Script) -> Iterator[Finding]:
    """Report names of TensorFlow 1 behind a `tensorflow` that only imports of submodules bind."""
    others = imports_rebinding_tensorflow(script)
    if not others or any(one.raw == "tensorflow" and one.bound == "tensorflow" for one in script.imports):
        return
    words = script.cached(v1_aliases)
    for use in script.uses:
        is_plain = use.root == "tensorflow" and not is_explicit_v1(use, words)
        is_of_it = is_plain and imported_word(script, first_word(use.node)) == "tensorflow"
        if is_of_it and standing(name_in_tensorflow(use.name)) is Standing.OLD:
            detail = f"It is `import {others[0].raw}` in line {script.line(others[0].node)}."
            yield Finding(RULE, script.line(use.node), Level.FAILS, _REBOUND, detail)
            return


def _of_tensorflow(script: Script, one: Imported) -> Edit | Finding:
    """Rewrite `import tensorflow`; report it if another import binds the same name."""
    is_named, others = one.bound != "tensorflow", imports_rebinding_tensorflow(script)
    if others and not is_named:
        detail = f"It is `import {others[0].raw}` in line {script.line(others[0].node)}."
        return Finding(RULE, script.line(one.node), Level.FAILS, _REBOUND, detail)
    name = cst.ensure_type(one.alias, cst.ImportAlias).name
    return Edit(RULE, *script.span(name), V1_MODULE if is_named else f"{V1_MODULE} as tensorflow")


def _behavior(script: Script, detected: DetectedVersion) -> Iterator[Result]:
    """Insert `disable_v2_behavior()` into a script that is run, or report why it is not inserted."""
    is_fitted = any(method(call)[1] in ("fit", "fit_generator") for call in script.nodes(cst.Call))
    switches = ("enable_", "disable_")
    called: dict[str, Use | Imported] = {
        name: one for one in uses_and_imports(script) if (name := name_in_tensorflow(one.name)).startswith(switches)
    }
    if "disable_v2_behavior" in called or not is_run(script):
        return
    chosen = next((one for name, one in called.items() if name in _EAGER), None)
    if chosen is not None:
        yield Finding(RULE, script.line(chosen.node), Level.NOTE, _IS_EAGER)
    elif "disable_eager_execution" in called:
        yield Finding(RULE, script.line(called["disable_eager_execution"].node), Level.NOTE, _ONLY_GRAPHS)
    elif detected.version is TfVersion.COMPAT_V1 and detected.keras and is_fitted:
        yield Finding(RULE, _first_import(script), Level.FAILS, _KERAS)
    else:
        yield _inserted(script)


def _inserted(script: Script) -> Edit | Finding:
    """Insert the call below the first import that binds TensorFlow; report a script that has no such import."""
    for imported in script.imports:
        statement = _statement(script, imported)
        if imported.name != "tensorflow" or not imported.bound or statement is None:
            continue
        place = script.end_of_line(statement)
        newline = script.module.default_newline
        start = "" if script.text[:place].endswith(("\n", "\r")) else newline
        line = script.text[script.start_of_line(statement) : script.span(statement)[0]]
        indent = line[: len(line) - len(line.lstrip())]
        word = v1_alias(script, imported.bound)
        return Edit(RULE, place, place, f"{start}{indent}{word}.{_CALL}{newline}")
    return Finding(RULE, _first_import(script), Level.FAILS, _NO_IMPORT)


def _statement(script: Script, imported: Imported) -> cst.CSTNode | None:
    """Return the statement below which the imported name is bound; None for an import inside a function or class."""
    above = [imported.node, *script.ancestors(imported.node)]
    if any(isinstance(node, cst.FunctionDef | cst.ClassDef) for node in above):
        return None
    line, outermost = above[1], above[-2]
    others = (one.node for one in script.imports if one.bound == imported.bound and one.node is not imported.node)
    # If all branches of a statement bind the name, it is bound below the whole statement.
    both = any(outermost in script.ancestors(node) for node in others)
    is_main = asks_for_main(script, outermost)
    return line if isinstance(line, cst.SimpleStatementLine) and (is_main or not both) else outermost


def _first_import(script: Script) -> int:
    """Return the line of the first import of TensorFlow; of its first use if only a call imports it."""
    named = (one for one in uses_and_imports(script) if f"{one.name}.".startswith("tensorflow."))
    return min(script.line(one.node) for one in named)
