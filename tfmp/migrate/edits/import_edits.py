"""Creates the edits of import statements."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, MovedNames, NeededImport


def move_names(script: Script, every: Iterable[MovedNames]) -> Iterator[Edit]:
    """Yield one edit for each `from` import that names move out of, whichever rules move them.

    Examples:
        >>> script = Script("from a.b import X as Y, Z")
        >>> edit, = move_names(script, [MovedNames("R3", script.imports[0].node, {"X": ("tfmp", "X")})])
        >>> print(edit.text)
        from a.b import Z
        from tfmp import X as Y
    """
    together: dict[cst.ImportFrom, MovedNames] = {}
    for one in every:
        first = together.setdefault(one.statement, one)
        together[one.statement] = first._replace(targets={**one.targets, **first.targets})
    for rule, node, targets in together.values():
        yield _moved(script, node, rule, targets)


def add_imports(script: Script, needed: Sequence[NeededImport], edits: Sequence[Edit]) -> Iterator[Edit]:
    r"""Import each module that the edits use, once, above the first edit that uses it.

    The new import is below the first import of TensorFlow if that is alone on its line at the top level of the script.

    Examples:
        >>> script = Script("import tensorflow as tf\nopt = tf.contrib.X(opt)")
        >>> edit, = add_imports(script, [NeededImport("R2", "tfmp")], [Edit("R2", 30, 42, "tfmp.X")])
        >>> edit.start, edit.text
        (24, 'import tfmp\n')
    """
    present = {
        imported.raw
        for imported in script.imports
        if isinstance(imported.node, cst.Import)
        and imported.bound == imported.raw.split(".")[0]
        and script.is_top_level(imported.node)
    }
    first = {one.module: one for one in reversed(needed) if one.module not in present}
    for module in sorted(first):
        uses = [edit.start for edit in edits if edit.text == module or f"{module}." in edit.text]
        place = _place_for_imports(script, min(uses, default=len(script.text)))
        newline = script.module.default_newline
        lead = newline if place and not script.text[:place].endswith(("\n", "\r")) else ""
        yield Edit(first[module].rule, place, place, f"{lead}import {module}{newline}")


def without_statement(script: Script, node: cst.BaseSmallStatement, rule: str) -> Iterator[Edit]:
    """Remove a statement with its line. Yield nothing if it shares its line, or if its block would become empty."""
    line = script.parent(node)
    block = script.parent(line) if line is not None else None
    if script.is_alone(node) and isinstance(block, cst.IndentedBlock | cst.Module) and len(block.body) > 1:
        start, _ = script.span(node)
        yield Edit(rule, len(script.text[:start].rstrip(" \t")), script.end_of_line(node), "")


def _place_for_imports(script: Script, use: int) -> int:
    """Return the position at which to insert an import above a use, in characters."""
    tensorflows = (one.node for one in script.imports if one.name.split(".")[0] == "tensorflow")
    imports = [*tensorflows, *reversed(script.nodes(cst.Import, cst.ImportFrom))]
    ends = (script.end_of_line(node) for node in imports if script.is_top_level(node))
    return next((end for end in ends if end <= use), _top(script))


def _top(script: Script) -> int:
    """Return the position below the header comments, the docstring and the imports from `__future__`."""
    body = script.module.body
    place = script.start_of_line(body[0]) if body else len(script.text)
    for index, line in enumerate(body):
        is_docstring = index == 0 and script.module.get_docstring() is not None
        small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        is_future = isinstance(small, cst.ImportFrom) and dotted(small.module) == "__future__"
        if not is_docstring and not is_future:
            break
        place = script.end_of_line(line)
    return place


def _moved(script: Script, node: cst.ImportFrom, rule: str, targets: Mapping[str, tuple[str, str]]) -> Edit:
    if isinstance(node.names, cst.ImportStar):
        raise ValueError(f"{dotted(node.module)} is imported by a star: its names are not known.")
    kept = [alias for alias in node.names if alias.evaluated_name not in targets]
    moved = [alias for alias in node.names if alias.evaluated_name in targets]
    pairs = [(alias.evaluated_name, *targets.get(alias.evaluated_name, ("", ""))) for alias in node.names]
    modules = {module if word == name else "" for word, module, name in pairs}
    if len(modules) == 1 and "" not in modules and node.module is not None:
        # All names move to one module unrenamed, so parentheses, line breaks and comments stay.
        return Edit(rule, *script.span(node.module), *modules)
    (start, end), is_alone = script.span(node), script.is_alone(node)
    left, comments = _without_names(script, node, moved)
    statements = [left] if kept else []
    if kept and is_alone:
        # The rest of the line, such as a comment, stays with the names that are not moved.
        rest = re.split(r"[\r\n]", script.text[end:], maxsplit=1)[0]
        statements, end = [f"{left}{rest}"], end + len(rest)
    statements.extend(_imports_of(moved, targets, comments if is_alone else {}))
    indent = script.text[script.start_of_line(node) : start]
    between = f"{script.module.default_newline}{indent}" if is_alone else "; "
    return Edit(rule, start, end, between.join(statements))


def _without_names(
    script: Script, node: cst.ImportFrom, moved: Sequence[cst.ImportAlias]
) -> tuple[str, dict[cst.ImportAlias, str]]:
    """Return the code of an import without the moved names, and the comments that followed these."""
    aliases: list[cst.ImportAlias] = list(node.names)  # type: ignore[arg-type] # a star moves no names
    if node.lpar is None:
        kept = ", ".join(_renamed(alias.evaluated_name, alias) for alias in aliases if alias not in moved)
        return f"from {dotted(node.module)} import {kept}", {}
    (start, end), starts = script.span(node), [script.span(alias)[0] for alias in aliases]
    text, comments = script.text[start : starts[0]], {}
    for alias, first, last in zip(aliases, starts, [*starts[1:], end - 1], strict=True):
        piece = script.text[first:last]
        if alias not in moved:
            text += piece
            continue
        line, newline, below, *_ = (*re.split(r"(\r\n?|\n)", piece, maxsplit=1), "", "")
        if "#" in line:
            comments[alias] = line[line.index("#") + 1 :].strip()
        text += "" if text.endswith("(") and not below.strip() else newline + below
    # Empty lines, and a comma before the removed last name of a line, are not left.
    text = re.sub(r"(?:[ \t]*(\r\n?|\n))+", r"\1", text)
    return re.sub(r",[ \t]+\Z", "", text) + ")", comments


def _imports_of(
    moved: Sequence[cst.ImportAlias], targets: Mapping[str, tuple[str, str]], comments: Mapping[cst.ImportAlias, str]
) -> Iterator[str]:
    """Yield the imports of the moved names from their new modules, with their comments."""
    together: dict[tuple[str, str], list[cst.ImportAlias]] = {}
    for alias in moved:
        module, name = targets[alias.evaluated_name]
        if not name:
            continue
        together.setdefault((module, "" if module else name), []).append(alias)
    for (module, _), aliases in together.items():
        names = ", ".join(_renamed(targets[alias.evaluated_name][1], alias) for alias in aliases)
        said = "; ".join(comments[alias] for alias in aliases if alias in comments)
        yield (f"from {module} " if module else "") + f"import {names}" + (f"  # {said}" if said else "")


def _renamed(name: str, alias: cst.ImportAlias) -> str:
    """Return the code that imports a name as what an alias binds."""
    bound = alias.evaluated_alias or alias.evaluated_name
    return name if name == bound else f"{name} as {bound}"
