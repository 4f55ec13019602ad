"""R1: a script of TensorFlow 1 imports `tensorflow.compat.v1`, and starts with `disable_v2_behavior()`."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, Use, dotted, first_word
from tfmp.migrate.analysis.project_role import asks_for_main, is_run
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import (
    V1_MODULE,
    DetectedVersion,
    TfVersion,
    detect_version,
    imports_rebinding_tensorflow,
    name_in_tensorflow,
    v1_alias,
    v1_aliases,
)
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, Options, Result
from tfmp.migrate.tables.api_names import Standing, differs, standing
from tfmp.migrate.tables.changed_positions import FIRST_CHANGED

RULE = "R1"
_CALL = "disable_v2_behavior()"
_EAGER = frozenset(("enable_eager_execution", "enable_v2_behavior"))


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Give a script of TensorFlow 1 the names of `tf.compat.v1` and the behavior of TensorFlow 1."""
    del options
    detected = script.cached(detect_version)
    yield from _stars(script, detected)
    if detected.version is TfVersion.V1:
        yield from _imports(script)
    if detected.version in (TfVersion.V1, TfVersion.COMPAT_V1):
        yield from _behavior(script, detected)
    else:
        yield from _left_alone(script, detected)


def _stars(script: Script, detected: DetectedVersion) -> Iterator[Finding]:
    """Report star imports whose names belong to TensorFlow 1, or have to come from `tf.compat.v1`."""
    for one in script.imports:
        if one.bound or not f"{one.raw}.".startswith("tensorflow."):
            continue
        module = "" if one.raw in ("tensorflow", V1_MODULE) else f"{name_in_tensorflow(one.raw)}."
        names = [name for name in script.unbound_names if not module and name == "contrib"]
        if not one.raw.startswith(V1_MODULE):
            names += [name for name in script.unbound_names if standing(f"{module}{name}") is Standing.OLD]
        is_old = detected.version is TfVersion.V1 and not one.raw.startswith(V1_MODULE)
        if names or (is_old and (not module or differs(module.rstrip(".")))):
            first = f", as {names[0]} in line {script.unbound_names[names[0]][0]}" if names else ""
            advice = "; for contrib.mixed_precision write tfmp" if "contrib" in names else ""
            message = (
                f"a star import hides which names are of TensorFlow 1{first}: "
                f"write `import {V1_MODULE} as tf`, and tf. before each of them{advice}."
            )
            yield Finding(RULE, script.line(one.node), Level.FAILS, message)


def _left_alone(script: Script, detected: DetectedVersion) -> Iterator[Finding]:
    """Report why a script is not rewritten."""
    if detected.version is TfVersion.AMBIGUOUS:
        yield _unclear(script)
    if detected.version not in (TfVersion.V2, TfVersion.MIXED):
        return
    new = min(detected.new, key=lambda mark: script.line(mark.node))
    if detected.version is TfVersion.V2:
        message = f"written for TensorFlow 2 ({new.shown}): left alone."
        yield Finding(RULE, script.line(new.node), Level.NOTE, message)
        return
    old = min(detected.old, key=lambda mark: script.line(mark.node))
    message = (
        f"{new.shown} is of TensorFlow 2, but {old.shown} in line {script.line(old.node)} is of TensorFlow 1: left "
        f"alone. Write tf.compat.v1 for what is of 1, or `import {V1_MODULE} as tf` and tf.compat.v2 for what is of 2."
    )
    yield Finding(RULE, script.line(new.node), Level.FAILS, message)


def _unclear(script: Script) -> Finding:
    """Report a script that does not show which TensorFlow it was written for."""
    cannot = "cannot tell whether this was written for TensorFlow 1 or 2: left alone"
    changed = next((use for use in script.uses if _means_two_things(script, use)), None)
    if changed is None:
        message = f"{cannot}. Its calls take the same arguments in both."
        return Finding(RULE, _first_import(script), Level.NOTE, message)
    message = (
        f"{cannot}, but tf.{name_in_tensorflow(changed.name)} takes these arguments in another order in each. "
        "If it was for 1, "
        f"write `import {V1_MODULE} as tf`; if for 2, give them by keyword."
    )
    return Finding(RULE, script.line(changed.node), Level.FAILS, message)


def _means_two_things(script: Script, use: Use) -> bool:
    """Tell whether a positional argument of a call has another meaning in TensorFlow 2."""
    first, call = FIRST_CHANGED.get(name_in_tensorflow(use.name)), script.call_of(use.node)
    if first is None or call is None:
        return False
    return sum(arg.keyword is None and not arg.star for arg in call.args) > first


def _imports(script: Script) -> Iterator[Result]:
    """Replace the imports whose names differ between TensorFlow 1 and 2."""
    already = script.cached(v1_aliases)
    for node in script.nodes(cst.Import):
        for alias in node.names:
            name = dotted(alias.name)
            bound = dotted(alias.asname.name) if alias.asname else ""
            if name == "tensorflow" and (bound or name) not in already:
                yield _of_tensorflow(script, node, alias, bound)
            elif name.startswith("tensorflow.") and differs(name_in_tensorflow(name)):
                yield from _of_module(script, node, alias, bound)
    for statement in script.nodes(cst.ImportFrom):
        module = dotted(statement.module)
        if not statement.relative and f"{module}.".startswith("tensorflow."):
            yield from _from_import(script, statement, name_in_tensorflow(module))


def _of_tensorflow(script: Script, node: cst.Import, alias: cst.ImportAlias, bound: str) -> Edit | Finding:
    """Rewrite `import tensorflow`; report it if another import binds the same name."""
    others = imports_rebinding_tensorflow(script)
    if not bound and others:
        message = (
            f"`import {others[0].raw}` in line {script.line(others[0].node)} binds the name tensorflow too: "
            f"write `import {V1_MODULE} as tf`, and tf for tensorflow below."
        )
        return Finding(RULE, script.line(node), Level.FAILS, message)
    start, end = script.span(alias.name)
    return Edit(RULE, start, end, V1_MODULE if bound else f"{V1_MODULE} as tensorflow")


def _of_module(script: Script, node: cst.Import, alias: cst.ImportAlias, bound: str) -> Iterator[Result]:
    """Rewrite an import such as `import tensorflow.keras.backend as K` to the module below `tf.compat.v1`."""
    name = name_in_tensorflow(dotted(alias.name))
    if bound:
        yield Edit(RULE, *script.span(alias.name), f"{V1_MODULE}.{name}")
        return
    if any(one.raw in ("tensorflow", V1_MODULE) and one.bound == "tensorflow" for one in script.imports):
        return
    uses = (use for use in script.uses if first_word(use.node) == "tensorflow" and differs(name_in_tensorflow(use.raw)))
    first = next(uses, None)
    if first is not None:
        message = (
            f"`import tensorflow.{name}` brings TensorFlow 2's names, as {dotted(first.node)} in line "
            f"{script.line(first.node)}: write `import {V1_MODULE} as tf`, and tf for tensorflow below."
        )
        yield Finding(RULE, script.line(node), Level.FAILS, message)


def _from_import(script: Script, node: cst.ImportFrom, module: str) -> Iterator[Result]:
    """Move the names of a `from` import that differ between TensorFlow 1 and 2 to `tf.compat.v1`."""
    if isinstance(node.names, cst.ImportStar):
        return
    # `tf.app.flags` cannot be imported below `tf.compat.v1`; `tf.compat.v1.flags` is the same module.
    target = f"{V1_MODULE}.{'flags' if module == 'app.flags' else module}".rstrip(".")
    names = [dotted(alias.name) for alias in node.names]
    moved = [name for name in names if differs(f"{module}.{name}".lstrip("."))]
    if moved:
        yield MovedNames(RULE, node, {name: (target, name) for name in moved})


def _behavior(script: Script, detected: DetectedVersion) -> Iterator[Result]:
    """Insert `disable_v2_behavior()` into a script that is run, or report why it is not inserted."""
    called: dict[str, Use | Imported] = {
        name_in_tensorflow(use.name): use
        for use in script.uses
        if name_in_tensorflow(use.name).startswith(("enable_", "disable_"))
    }
    called |= {
        name_in_tensorflow(one.name): one
        for one in script.imports
        if name_in_tensorflow(one.name) == "disable_v2_behavior"
    }
    if "disable_v2_behavior" in called or not is_run(script):
        return
    chosen = next((use for name, use in called.items() if name in _EAGER), None)
    if chosen is not None:
        message = (
            f"tf.{name_in_tensorflow(chosen.name)}() asks for eager execution, so tf.{_CALL} is not inserted: "
            "write it instead if the script trains in a session."
        )
        yield Finding(RULE, script.line(chosen.node), Level.NOTE, message)
    elif "disable_eager_execution" in called:
        message = (
            "tf.disable_eager_execution() alone leaves resource variables and TensorFlow 2's control flow on: "
            f"write tf.{_CALL} instead to have TensorFlow 1's behaviour, names and fetches."
        )
        yield Finding(RULE, script.line(called["disable_eager_execution"].node), Level.NOTE, message)
    elif detected.version is TfVersion.COMPAT_V1 and detected.keras and _fits(script):
        message = (
            "cannot tell whether Keras is to train as in TensorFlow 1 or eagerly: left alone. If as in 1, write "
            f"tf.compat.v1.{_CALL} below the imports; if eagerly, tf.compat.v1.enable_eager_execution()."
        )
        yield Finding(RULE, _first_import(script), Level.FAILS, message)
    else:
        yield _inserted(script, detected)


def _inserted(script: Script, detected: DetectedVersion) -> Edit | Finding:
    """Insert the call below the first import that binds TensorFlow; report a script that has no such import."""
    for imported in script.imports:
        statement = _statement(script, imported)
        if imported.name != "tensorflow" or not imported.bound or statement is None:
            continue
        place = script.end_of_line(statement)
        newline = script.module.default_newline
        start = "" if script.text[:place].endswith(("\n", "\r")) else newline
        word = v1_alias(script, detected, imported.bound)
        return Edit(RULE, place, place, f"{start}{_indent(script, statement)}{word}.{_CALL}{newline}")
    message = f"this script is run, but imports no tensorflow at its top: call {V1_MODULE}.{_CALL} before all else."
    return Finding(RULE, _first_import(script), Level.FAILS, message)


def _statement(script: Script, imported: Imported) -> cst.CSTNode | None:
    """Return the statement below which the imported name is bound; None for an import inside a function or class."""
    above = [imported.node, *script.ancestors(imported.node)]
    if any(isinstance(node, cst.FunctionDef | cst.ClassDef) for node in above):
        return None
    line, outermost = above[1], above[-2]
    others = (one.node for one in script.imports if one.bound == imported.bound and one.node is not imported.node)
    # If all branches of a statement bind the name, it is bound below the whole statement.
    both = any(outermost in script.ancestors(node) for node in others)
    is_main = isinstance(outermost, cst.If) and asks_for_main(outermost)
    return line if isinstance(line, cst.SimpleStatementLine) and (is_main or not both) else outermost


def _indent(script: Script, statement: cst.CSTNode) -> str:
    start, _ = script.span(statement)
    line = script.text[:start].replace("\r", "\n").rpartition("\n")[2]
    return line[: len(line) - len(line.lstrip())]


def _fits(script: Script) -> bool:
    """Tell whether the script trains a Keras model with `fit`."""
    return any(
        isinstance(call.func, cst.Attribute) and call.func.attr.value in ("fit", "fit_generator")
        for call in script.nodes(cst.Call)
    )


def _first_import(script: Script) -> int:
    return next(script.line(one.node) for one in script.imports if f"{one.name}.".startswith("tensorflow."))
