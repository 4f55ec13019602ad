"""R5: names of the NPU bridge for loss scaling are imported from tfmp.npu."""

from collections.abc import Iterator, Mapping, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, argument, dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import is_guarded
from tfmp.migrate.edits.import_edits import without_statement
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, Result
from tfmp.migrate.tables.npu_bridge_names import MEMBERS, STAR, advised, import_lines, in_lines, is_of_bridge, target

RULE = "R5"
_STAR_RULE = "R5*"
_PACKAGES = ("npu_bridge", "hccl", "tensorflow.contrib.offline_train")
# A script that also supports Python 2 uses these names only after it has detected Python 2.
_OF_PYTHON2 = frozenset(
    ("basestring", "buffer", "cmp", "execfile", "file", "intern", "long", "raw_input", "reduce", "reload", "unichr")
) | {"unicode", "xrange"}
_GUARDED = (
    "This import of the NPU bridge stands in a `try`. Where there is no NPU, the import fails and the script runs the "
    "`except` branch: check that this branch scales the loss."
)
_MISSING = "The NPU bridge exists only on the NPU. Remove this import, and replace what the script uses of it."
_IN_BRANCH = (
    "A star import of the NPU bridge stands in a branch or shares its line, and fails where there is no NPU. Write "
    "imports of the names that it must provide in its place."
)
_STAR_LEFT = (
    "A star import of the NPU bridge, which fails where there is no NPU, may bind names that tfmp does not have."
)
_UNCHECKED = (
    "enable_overflow_check=False makes NPULossScaleOptimizer apply every step, whatever its gradients are: a single "
    "infinity or NaN, which float16 produces on CPU and GPU, ruins the weights for good. Remove the argument, so that "
    "steps that overflow are skipped."
)
_ALONE = (
    "is_distributed=True lets several processes decide together about each step. If nothing distributes the training, "
    "as in one process, NPULossScaleOptimizer raises an error. Remove the argument, or call hvd.init() of "
    "horovod.tensorflow before the optimizer is constructed."
)

_NO_MEMBER = "tfmp.npu does not have this function of the NPU bridge. Write it with functions of TensorFlow."


def rewrite(script: Script) -> Iterator[Result]:
    """Import the names that tfmp.npu has from it, remove imports that nothing uses, and report the other names."""
    imports = [one for one in script.imports if _is_of_bridge(one.name)]
    nodes = dict.fromkeys(one.node for one in imports)
    stars = [node for node in nodes if isinstance(node.names, cst.ImportStar)]
    yield from _stars(script, [node for node in stars if not is_guarded(script, node)])
    for node in nodes:
        if is_guarded(script, node):
            yield Finding(RULE, script.line(node), Level.NOTE, _GUARDED)
        elif node not in stars:
            yield from _replaced(script, node, [one for one in imports if one.node is node])
    yield from _arguments(script, has_stars=bool(stars))
    yield from _members(script, has_stars=bool(stars))


def _is_of_bridge(name: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in _PACKAGES)


def _replaced(script: Script, node: cst.Import | cst.ImportFrom, imported: Sequence[Imported]) -> Iterator[Result]:
    """Import the names that tfmp has from it, remove those that nothing uses, and report the others."""
    lines: dict[str, list[int]] = {}
    for one in imported:
        module, word = target(one.name), one.name.rpartition(".")[2]
        if module and isinstance(node, cst.ImportFrom):
            yield MovedNames(RULE, node, {word: (module, word)})
        elif module and word not in MEMBERS and one.alias is not None and one.alias.asname is not None:
            yield Edit(RULE, *script.span(one.alias.name), f"{module}.{word}")
        else:
            shown = one.raw if isinstance(node, cst.Import) else word
            names = [name for name in script.scopes.words.get(one.bound, ()) if script.is_use(name)]
            lines[shown] = sorted({*lines.get(shown, ()), *(script.line(name) for name in names)})
    removed = list(_removed(script, node, [name for name, found in lines.items() if not found]))
    yield from removed
    left = {name: found for name, found in lines.items() if found or not removed}
    if left:
        yield Finding(RULE, script.line(node), Level.FAILS, _MISSING, f"{advised(left)}.")


def _removed(script: Script, node: cst.Import | cst.ImportFrom, unused: Sequence[str]) -> Iterator[Result]:
    """Remove names from an import, or the import if it has no others; nothing if that needs a person.

    A file with `__all__`, or with nothing but imports, may import names for other files.
    """
    if "__all__" in script.scopes.words or not script.nodes(cst.Assign, cst.Call, cst.FunctionDef, cst.ClassDef):
        return
    if not isinstance(node.names, cst.ImportStar) and len(unused) == len(node.names):
        yield from without_statement(script, node, RULE)
    elif isinstance(node, cst.ImportFrom) and unused:
        yield MovedNames(RULE, node, dict.fromkeys(unused, ("", "")))


def _stars(script: Script, nodes: Sequence[cst.CSTNode]) -> Iterator[Result]:
    """Import the names one by one if all of them are known, and report the star imports otherwise."""
    free = {name: lines for name, lines in script.unbound_names.items() if nodes and name not in _OF_PYTHON2}
    ours = [name for name in free if target(f"{STAR}.{name}") is not None]
    known = {*ours, *(name for raw, names in script.star_names.items() if not _is_of_bridge(raw) for name in names)}
    left = {name: lines for name, lines in free.items() if name not in known}
    for node in nodes:
        start, end = script.span(node)
        if not script.is_top_level(node):
            yield Finding(_STAR_RULE, script.line(node), Level.FAILS, _IN_BRANCH)
        elif left:
            yield Finding(_STAR_RULE, script.line(node), Level.FAILS, _STAR_LEFT, _of_star(script, left, ours))
        elif ours and node is nodes[0]:
            yield Edit(_STAR_RULE, start, end, script.module.default_newline.join(import_lines(ours)))
        else:
            yield Edit(_STAR_RULE, start, script.end_of_line(node), "")


def _of_star(script: Script, left: Mapping[str, Sequence[int]], ours: Sequence[str]) -> str:
    theirs = {name: lines for name, lines in left.items() if is_of_bridge(name)}
    unknown = ", ".join(f"{name} ({in_lines(lines)})" for name, lines in left.items() if name not in theirs)
    stars = [one.raw for one in script.imports if not one.bound and not _is_of_bridge(one.name)]
    others = [raw for raw in stars if "*" in script.star_names.get(raw, "*")]
    by = f"Only the star import of {', '.join(others)} may bind {unknown}. " if others else f"Nothing binds {unknown}. "
    rest = " and ".join(f"`{line}`" for line in import_lines(ours))
    told = f"Replace what is of the bridge: {advised(theirs)}. " if theirs else ""
    instead = f"write {rest} in place of this line" if rest else "remove this line"
    return f"{told}{by if unknown else ''}Once these names come from elsewhere, {instead}."


def _arguments(script: Script, *, has_stars: bool) -> Iterator[Finding]:
    """Report a check for overflow that is turned off, and a wrapper that waits for processes that nothing connects."""
    for call in script.nodes(cst.Call):
        name = script.function_name(call)
        if not (name.startswith("tfmp.npu.") or _is_of_bridge(name) or (has_stars and name == script.last_word(call))):
            continue
        if name.endswith("FixedLossScaleManager") and dotted(argument(call, 1, "enable_overflow_check")) == "False":
            yield Finding(RULE, script.line(call), Level.WRONG, _UNCHECKED)
        is_distributed = dotted(argument(call, 2, "is_distributed")) == "True"
        if name.endswith("NPULossScaleOptimizer") and is_distributed and not _may_have_processes(script, call):
            yield Finding(RULE, script.line(call), Level.FAILS, _ALONE)


def _may_have_processes(script: Script, call: cst.Call) -> bool:
    """Tell whether a script uses Horovod, or a call stands in a branch, which may ask for the number of processes."""
    branches = (above for above in script.ancestors(call) if isinstance(above, cst.If | cst.IfExp))
    is_conditional = any(not script.code(branch.test).startswith("__name__") for branch in branches)
    return is_conditional or any(one.name.startswith("horovod.") for one in script.imports)


def _members(script: Script, *, has_stars: bool) -> Iterator[Finding]:
    """Report functions that tfmp.npu does not have in a module that it has."""
    for module, members in MEMBERS.items():
        imports = [one for one in script.imports if one.name.endswith(f".{module}") and one.module == one.raw]
        ours = [one for one in imports if one.name.startswith("tfmp.npu.") or _is_of_bridge(one.name)]
        words = {one.bound for one in ours if not is_guarded(script, one.node)}
        words |= {module} if has_stars and module in script.unbound_names else set()
        for root in (root for word in sorted(words) for root in script.scopes.words.get(word, ())):
            name = dotted(script.whole_name(root))
            if script.is_use(root) and "." in name and name.split(".")[1] not in members:
                yield Finding(RULE, script.line(root), Level.FAILS, _NO_MEMBER, f"It is {name}.")
