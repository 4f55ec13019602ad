"""R5*: `from npu_bridge.npu_init import *` becomes imports of the names that the script uses."""

from collections.abc import Iterator, Mapping, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import literal_text
from tfmp.migrate.analysis.guarded_imports import is_guarded
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, Finding, Level, Options, Result
from tfmp.migrate.tables.npu_bridge_names import (
    GRAPH_PASS,
    LOSS_SCALES,
    STAR,
    advised,
    import_lines,
    in_lines,
    is_of_bridge,
    target,
)

RULE = "R5*"
_LINE = f"from {STAR} import *"
# A script that also supports Python 2 uses these names only after it has detected Python 2.
_OF_PYTHON2 = frozenset(
    ("basestring", "buffer", "cmp", "execfile", "file", "intern", "long", "raw_input", "reduce", "reload", "unichr")
) | {"unicode", "xrange"}
_RUN_TEXT = ("eval", "exec", "globals", "vars")


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Import the names one by one if all of them are known, and report the star import otherwise."""
    del options
    nodes = [one.node for one in script.imports if one.name == STAR and not one.bound]
    if not nodes:
        return
    line = script.line(nodes[0])
    free = {name: lines for name, lines in script.unbound_names.items() if name not in _OF_PYTHON2}
    ours = [name for name in free if target(f"{STAR}.{name}")]
    theirs = {name: lines for name, lines in free.items() if name not in ours and is_of_bridge(name)}
    unknown = {name: lines for name, lines in free.items() if name not in ours and name not in theirs}
    in_text = _names_in_text(script)
    if any(is_guarded(script, node) for node in nodes):
        message = f"`{_LINE}` stands in a `try`: outside of the NPU the script takes the `except` branch."
        yield Finding(RULE, line, Level.NOTE, message)
    elif not all(script.is_top_level(node) for node in nodes):
        message = f"`{_LINE}` stands in a branch: write the imports of the names that it needs, or remove it."
        yield Finding(RULE, line, Level.FAILS, message)
    elif theirs:
        yield Finding(RULE, line, Level.FAILS, _of_bridge(theirs, ours))
    elif unknown:
        yield Finding(RULE, line, Level.FAILS, _of_nobody(script, unknown, ours))
    elif in_text:
        message = f"{', '.join(in_text)} may be looked up by name, through eval, exec, globals or vars:"
        yield Finding(RULE, line, Level.FAILS, f"{message} replace `{_LINE}` by imports of the names that are used.")
    else:
        yield from _edits(script, nodes, import_lines(ours))


def _of_bridge(names: Mapping[str, Sequence[int]], ours: Sequence[str]) -> str:
    rest = " and ".join(f"`{line}`" for line in import_lines(ours))
    instead = f"replace this line by {rest}" if rest else "remove this line"
    problem = "the script uses names of the NPU bridge that tfmp does not have"
    return f"{problem}; replace them, then {instead}. {advised(names)}."


def _of_nobody(script: Script, names: Mapping[str, Sequence[int]], ours: Sequence[str]) -> str:
    listed = ", ".join(f"{name} ({in_lines(lines)})" for name, lines in names.items())
    stars = [one.raw for one in script.imports if not one.bound and one.name != STAR]
    by = f"only the star import of {', '.join(stars)} may bind" if stars else "nothing in the script binds"
    rest = " and ".join(f"`{line}`" for line in import_lines(ours))
    instead = f"replace this line by {rest}" if rest else "remove this line"
    return f"{by} {listed}. If they do not come from the NPU bridge, {instead}."


def _names_in_text(script: Script) -> list[str]:
    """Return names of the bridge that occur as strings, if the script evaluates strings as code."""
    if not any(name.value in _RUN_TEXT and script.is_builtin(name) for name in script.nodes(cst.Name)):
        return []
    names = {literal_text(text) for text in script.nodes(cst.SimpleString)} - {GRAPH_PASS}
    return sorted(name for name in names if name.isidentifier() and (name in LOSS_SCALES or is_of_bridge(name)))


def _edits(script: Script, nodes: Sequence[cst.CSTNode], lines: Sequence[str]) -> Iterator[Edit]:
    for node in nodes:
        start, end = script.span(node)
        if lines and node is nodes[0]:
            yield Edit(RULE, start, end, script.module.default_newline.join(lines))
        else:
            yield Edit(RULE, start, script.end_of_line(node), "")
