"""R3: imports from tf.contrib.mixed_precision become imports from tfmp."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, Options, Result
from tfmp.migrate.rules.contrib.contrib_names import MODULE, NAMES

RULE = "R3"
# Every public name of these modules is also a name of tfmp.
_MODULES = (
    MODULE,
    f"{MODULE}.python",
    f"{MODULE}.python.loss_scale_manager",
    f"{MODULE}.python.loss_scale_optimizer",
)
_LISTED = ", ".join(sorted(NAMES))


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Import the same names from tfmp, and report names that never existed."""
    del options
    for node in dict.fromkeys(one.node for one in script.imports if f"{one.name}.".startswith(f"{MODULE}.")):
        imported = [one for one in script.imports if one.node is node]
        if isinstance(node, cst.Import):
            yield from _modules(script, node)
        elif isinstance(node.names, cst.ImportStar):
            message = f"a star import from {imported[0].raw}: write `from tfmp import` with the names that are used."
            yield Finding(RULE, script.line(node), Level.FAILS, f"{message} There were {_LISTED}.")
        else:
            yield from _names(script, node, imported)
    yield from _unknown_attributes(script)


def _names(script: Script, node: cst.ImportFrom, imported: list[Imported]) -> Iterator[Result]:
    targets = {}
    for one in imported:
        module, _, name = one.name.rpartition(".")
        if one.name in _MODULES:
            targets[name] = ("", "tfmp")
        elif module in _MODULES and name in NAMES:
            targets[name] = ("tfmp", name)
        elif module in _MODULES:
            message = f"{one.raw.rpartition('.')[0]} had no {name}: the names of tf.contrib.mixed_precision were"
            yield Finding(RULE, script.line(node), Level.FAILS, f"{message} {_LISTED}.")
    if targets:
        yield MovedNames(RULE, node, targets)


def _modules(script: Script, node: cst.Import) -> Iterator[Result]:
    for alias, one in zip(node.names, (one for one in script.imports if one.node is node), strict=True):
        if one.name not in _MODULES:
            continue
        start, end = script.span(alias.name)
        if alias.asname is not None:
            yield Edit(RULE, start, end, "tfmp")
            continue
        others = _other_uses(script, one)
        if others:
            yield Finding(
                RULE,
                script.line(node),
                Level.FAILS,
                f"`import {one.raw}` also binds the name {one.bound}, which line {others[0]} uses: write `import tfmp` "
                f"here, and import {one.bound} by itself.",
            )
        elif len(node.names) == 1 and script.is_top_level(node):
            # R2 adds `import tfmp` where it rewrites a use.
            yield Edit(RULE, script.span(node)[0], script.end_of_line(node), "")
        else:
            yield Edit(RULE, start, end, "tfmp")


def _other_uses(script: Script, imported: Imported) -> list[int]:
    """Return the lines that use the name of an import without `as` for more than tf.contrib.mixed_precision."""
    if any(one.bound == imported.bound and one.name not in _MODULES for one in script.imports):
        return []
    uses = (use for use in script.uses if use.raw.split(".")[0] == imported.bound == use.root)
    known = {f"{MODULE}.{name}" for name in NAMES}
    return [script.line(use.node) for use in uses if ".".join(use.name.split(".")[:4]) not in known]


def _unknown_attributes(script: Script) -> Iterator[Finding]:
    """Report uses of `mixed_precision.X` where tfmp has no X."""
    for use in script.uses:
        if use.root not in _MODULES or use.name == use.root:
            continue
        name = use.name[len(use.root) + 1 :].split(".")[0]
        if name not in NAMES:
            message = f"{use.root} had no public {name}, and tfmp has none: write one of {_LISTED}."
            yield Finding(RULE, script.line(use.node), Level.FAILS, message)
