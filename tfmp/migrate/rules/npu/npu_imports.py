"""R5: names of the NPU bridge for loss scaling are imported from tfmp.npu."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, dotted
from tfmp.migrate.analysis.guarded_imports import is_guarded
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, Options, Result
from tfmp.migrate.tables.npu_bridge_names import LOSS_SCALES, MODULES, STAR, advised, target

RULE = "R5"
_PACKAGES = ("npu_bridge", "hccl", "tensorflow.contrib.offline_train")


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Import the loss-scaling names from tfmp.npu, and report the other names of the bridge."""
    del options
    for node in dict.fromkeys(one.node for one in script.imports if _is_of_bridge(one)):
        imported = [one for one in script.imports if one.node is node and _is_of_bridge(one)]
        if is_guarded(script, node):
            message = "the import stands in a `try`: outside of the NPU the script takes the `except` branch."
            yield Finding(RULE, script.line(node), Level.NOTE, message)
        elif isinstance(node, cst.Import):
            yield from _modules(script, node, imported)
        elif isinstance(node.names, cst.ImportStar):
            yield from _star(script, node)
        else:
            targets = {one.name.rpartition(".")[2]: target(one.name) for one in imported}
            moved = {name: found for name, found in targets.items() if found is not None}
            if moved:
                yield MovedNames(RULE, node, moved)
            yield from _left(script, node, [one for one in imported if target(one.name) is None])
    yield from _unknown_attributes(script)


def _is_of_bridge(imported: Imported) -> bool:
    of_star_rule = imported.name == STAR and not imported.bound
    return not of_star_rule and any(f"{imported.name}.".startswith(f"{package}.") for package in _PACKAGES)


def _star(script: Script, node: cst.ImportFrom) -> Iterator[Finding]:
    message = "a star import of the NPU bridge, which exists only on the NPU"
    free = [name for name in script.unbound_names if name in LOSS_SCALES]
    if free:
        message += f": write `from tfmp.npu import {', '.join(sorted(free))}` for the names that the script uses."
    elif script.unbound_names:
        message += ": import or replace one by one the names that the script uses."
    else:
        message += ", and the script uses nothing of it: remove this line."
    yield Finding(RULE, script.line(node), Level.FAILS, message)


def _modules(script: Script, node: cst.Import, imported: Sequence[Imported]) -> Iterator[Result]:
    left = []
    for alias in node.names:
        one = next((one for one in imported if one.raw == dotted(alias.name)), None)
        if one is None:
            continue
        start, end = script.span(alias.name)
        if target(one.name) is None:
            left.append(one)
        elif alias.asname is not None:
            yield Edit(RULE, start, end, f"tfmp.npu.{one.name.rpartition('.')[2]}")
        elif _only_loss_scales(script, one):
            yield Edit(RULE, start, end, "tfmp.npu")
            yield from _uses(script, one)
        else:
            left.append(one)
    yield from _left(script, node, left)


def _only_loss_scales(script: Script, imported: Imported) -> bool:
    """Tell whether the name bound by an import without `as` is used only for loss scaling."""
    uses = [use for use in script.uses if use.root == imported.bound]
    others = [one for one in script.imports if one.bound == imported.bound and one.name != imported.name]
    return not others and all(target(use.name) is not None for use in uses)


def _uses(script: Script, imported: Imported) -> Iterator[Edit]:
    for use in script.uses:
        if use.root == imported.bound and target(use.name) is not None:
            yield Edit(RULE, *script.span(use.node), f"tfmp.npu.{use.name.rpartition('.')[2]}")


def _left(script: Script, node: cst.CSTNode, imported: Sequence[Imported]) -> Iterator[Finding]:
    if not imported:
        return
    used = {_name(one): _lines_of(script, one) for one in imported}
    message = "the NPU bridge exists only on the NPU"
    if any(used.values()):
        yield Finding(RULE, script.line(node), Level.FAILS, f"{message}. {advised(used)}.")
    else:
        message = f"{message}, and the script does not use {', '.join(used)}: remove it from this line."
        yield Finding(RULE, script.line(node), Level.FAILS, message)


def _name(imported: Imported) -> str:
    return imported.raw if isinstance(imported.node, cst.Import) else imported.name.rpartition(".")[2]


def _lines_of(script: Script, imported: Imported) -> list[int]:
    names = (name for name in script.nodes(cst.Name) if name.value == imported.bound)
    return sorted({script.line(name) for name in names if script.is_use(name)})


def _unknown_attributes(script: Script) -> Iterator[Finding]:
    """Report uses of `npu_loss_scale_manager.X` where tfmp.npu has no X."""
    for use in script.uses:
        module, _, name = use.name.rpartition(".")
        last = module.rpartition(".")[2]
        if module == use.root and last in MODULES and target(module) is not None and name not in LOSS_SCALES:
            message = (
                f"tfmp.npu.{last} has no {name}: {', '.join(sorted(LOSS_SCALES))} are what it has of the NPU bridge."
            )
            yield Finding(RULE, script.line(use.node), Level.FAILS, message)
