"""R13, first part: other names of `tf.contrib` become their successors, if these take the same arguments."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.bindings import own_names
from tfmp.migrate.analysis.expressions import Imported, Use, first_word, without_last_words
from tfmp.migrate.analysis.guarded_imports import is_checked_for, is_guarded
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import V1_MODULE, detect_version, v1_alias
from tfmp.migrate.edits.import_edits import without_statement
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, NeededImport, Options, Result
from tfmp.migrate.rules.contrib.contrib_names import MODULE, NAMES
from tfmp.migrate.tables.contrib_successors import SUCCESSORS, Successor, advice, find_successor

RULE = "R13"
_CONTRIB = "tensorflow.contrib"
# R2 and R3 handle the first of these packages, R5 handles the second.
_OTHERS = ("mixed_precision", "offline_train")
_PACKAGES = frozenset(("python", "nest", "xla", "jit", "plugins", "nets", "ops"))


# Returns the script's expression for `tf.compat.v1`, given its name for TensorFlow.
_Word = Callable[[str], str]


class _Left(NamedTuple):
    """A name of `tf.contrib` that is left for a person, with its line."""

    name: str
    line: int


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Replace names that have a successor with the same arguments, and list the others."""
    del options
    uses = [use for use in script.uses if _is_ours(use.name)]
    imports = [one for one in script.imports if _is_ours(one.name) or one.name == _CONTRIB]
    if not uses and not imports:
        return
    left: list[_Left] = []
    word = partial(v1_alias, script, script.cached(detect_version))
    for use in uses:
        if use.root == "tensorflow":
            edits = _replaced(script, use, word(first_word(use.node)))
            yield from edits
            left.extend([] if edits else _noted(script, use))
    by_statement: dict[cst.Import | cst.ImportFrom, list[Imported]] = defaultdict(list)
    for one in imports:
        by_statement[one.node].append(one)
    for node, names in by_statement.items():
        yield from _of_import(script, node, names, word, left)
    yield from _listed(left)


def _of_import(
    script: Script, node: cst.Import | cst.ImportFrom, names: Sequence[Imported], word: _Word, left: list[_Left]
) -> Iterator[Result]:
    """Rewrite one import statement, or the uses of the module that it imports."""
    moved: dict[str, tuple[str, str]] = {}
    for one in names:
        name = one.name[len(_CONTRIB) + 1 :]
        uses = [use for use in script.uses if use.root == one.name and first_word(use.node) == one.bound]
        if isinstance(node, cst.ImportFrom) and _can_move(script, one, uses):
            successor = SUCCESSORS[name]
            module, _, last = f"{successor.module or V1_MODULE}.{successor.name}".rpartition(".")
            moved[name.rpartition(".")[2]] = module, last
        elif not one.bound or "." in name or not uses:
            left.extend([] if is_guarded(script, node) else [_Left(name, script.line(node))])
        else:
            yield from _of_module(script, one, uses, _top_word(script, word, uses), left)
    if moved and isinstance(node, cst.ImportFrom):
        yield MovedNames(RULE, node, moved)


def _can_move(script: Script, one: Imported, uses: Sequence[Use]) -> bool:
    """Tell whether an imported name can be imported from its successor's module instead."""
    successor = SUCCESSORS.get(one.name[len(_CONTRIB) + 1 :])
    if successor is None or not successor.is_checked:
        return successor is not None
    return _reads(script, one.bound) == len(uses) and all(_suits(script, use.node, successor) for use in uses)


def _of_module(script: Script, one: Imported, uses: Sequence[Use], word: str, left: list[_Left]) -> Iterator[Result]:
    """Rewrite the uses of an imported module, and remove its import if no use is left."""
    others = [use for use in uses if not _is_of_r2(use)]
    results = {use.node: _replaced(script, use, word) if word else [] for use in others}
    whole = all(results.values()) and _reads(script, one.bound) == len(uses)
    is_alone = len(one.node.names) == 1  # type: ignore[arg-type] # a star binds no module's name
    removal = list(without_statement(script, one.node, RULE)) if is_alone else []
    if whole and removal:
        for edits in results.values():
            yield from edits
        yield from removal
        return
    noted = [use for use in others if use.name not in (one.name, MODULE) and not results[use.node]]
    for use in noted:
        left.extend(_noted(script, use))
    for edits in results.values():
        yield from edits
    is_followed = one.name == _CONTRIB and len(noted) < len(others)
    is_left = (not noted and not is_followed) or one.name == f"{_CONTRIB}.slim"
    if is_left and not is_guarded(script, one.node):
        left.append(_Left(one.name[len(_CONTRIB) + 1 :], script.line(one.node)))


def _replaced(script: Script, use: Use, word: str) -> list[Result]:
    """Return the edit that replaces a use; empty without a successor, or if the successor takes other arguments."""
    name = use.name[len(_CONTRIB) + 1 :]
    found = find_successor(name)
    if found is None:
        return []
    known, successor = found
    node = without_last_words(use.node, name.count(".") - known.count("."))
    if not _suits(script, node, successor):
        return []
    edit = Edit(RULE, *script.span(node), f"{successor.module or word}.{successor.name}")
    return [edit, NeededImport(RULE, successor.module)] if successor.module else [edit]


def _suits(script: Script, node: cst.CSTNode, successor: Successor) -> bool:
    """Tell whether the successor accepts the arguments of a call with the same meaning."""
    if successor.keywords is None:
        return True
    call = script.call_of(node)
    if call is None or any(arg.star for arg in call.args):
        return False
    named = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    in_order = len(call.args) - len(named)
    ones = all(name in named and _is_minus_one(named[name]) for name in successor.minus_ones)
    return named.keys() <= successor.keywords and ones and in_order <= (successor.positional or 0)


def _is_minus_one(value: cst.BaseExpression) -> bool:
    if not isinstance(value, cst.UnaryOperation) or not isinstance(value.operator, cst.Minus):
        return False
    return isinstance(value.expression, cst.Integer) and value.expression.value == "1"


def _top_word(script: Script, word: _Word, uses: Sequence[Use]) -> str:
    """Return the expression for `tf.compat.v1` at these uses; empty if TensorFlow may not be bound there."""
    tops = (one for one in script.imports if one.name == "tensorflow" and one.bound and script.is_top_level(one.node))
    first = next(tops, None)
    if first is None or script.span(first.node) > min(script.span(use.node) for use in uses):
        return ""
    own = [name for name, _ in own_names(script)]
    own += [one.bound for one in script.imports if one.name != "tensorflow"]
    return word(first.bound) if first.bound not in own else ""


def _reads(script: Script, bound: str) -> int:
    """Return the number of uses of a word as a variable."""
    return sum(script.is_use(name) for name in script.nodes(cst.Name) if name.value == bound)


def _noted(script: Script, use: Use) -> list[_Left]:
    """Return a use that is left for a person; empty if the script checks that the name exists."""
    name = _Left(use.name[len(_CONTRIB) + 1 :], script.line(use.node))
    return [] if is_checked_for(script, use.node) else [name]


def _listed(left: Sequence[_Left]) -> Iterator[Finding]:
    """Report each name once."""
    lines: dict[str, list[int]] = defaultdict(list)
    for one in left:
        lines[_short(one.name)].append(one.line)
    for name, places in lines.items():
        count = f" ({len(places)} places)" if len(places) > 1 else ""
        told = advice(name)
        full = f"tf.contrib.{name}" if name else "tf.contrib"
        message = f"{full} is not in TensorFlow 2{count}{f': {told}' if told else ''}."
        yield Finding(RULE, min(places), Level.FAILS, message)


def _short(name: str) -> str:
    """Return the part of a name that is reported once: a package, or a function of a module."""
    words = name.split(".")
    if words[0] == "slim":
        return words[0]
    count = 2
    while count < len(words) and words[count - 1] in _PACKAGES | {words[0]}:
        count += 1
    return ".".join(words[:count])


def _is_ours(name: str) -> bool:
    return name.startswith(f"{_CONTRIB}.") and name.split(".")[2] not in _OTHERS


def _is_of_r2(use: Use) -> bool:
    return use.name.startswith(f"{MODULE}.") and use.name[len(MODULE) + 1 :].split(".")[0] in NAMES
