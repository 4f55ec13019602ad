"""R13, first part: other names of `tf.contrib` become their successors, if these take the same arguments."""

import re
from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, Use, dotted, first_word, method, without_last_words
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import V1_MODULE, is_checked_for, is_guarded, v1_alias
from tfmp.migrate.edits.import_edits import without_statement
from tfmp.migrate.edits.results import Edit, MovedNames, NeededImport, Result, at_first_lines
from tfmp.migrate.tables.contrib_successors import ADVICE, SUCCESSORS, Successor, advice, find_successor

RULE = "R13"
_CONTRIB = "tensorflow.contrib"
# R2 and R3 handle the first of these packages, R5 handles the second.
_OTHERS = ("mixed_precision", "offline_train")
_SLIM = "slim"
_HPARAMS = "training.HParams"
_LIKE_HPARAMS = re.compile(r"(^|[._])(hp|hps|\w*hparams?)$")
_TRAIN_OP = "slim.learning.create_train_op"
# The arguments with which tf_slim looks for names that TensorFlow 2.15 does not have.
_FAILING = frozenset(("clip_gradient_norm", "gradient_multipliers", "summarize_gradients"))
_PACKAGES = frozenset(("python", "nest", "xla", "jit", "plugins", "nets", "ops"))


def rewrite(script: Script) -> Iterator[Result]:
    """Replace names that have a successor with the same arguments, and list the others."""
    imports = [one for one in script.imports if _is_ours(one.name)]
    moved = {one: target for one in imports if (target := _target(script, one)) is not None}
    done = {one.bound for one in moved}
    uses = [use for use in script.uses if _is_ours(use.name) and first_word(use.node) not in done]
    edits = {use: list(_replaced(script, use)) for use in uses if use.name != use.root}
    for one, target in moved.items():
        yield MovedNames(RULE, cst.ensure_type(one.node, cst.ImportFrom), {one.name.rpartition(".")[2]: target})
    for found in edits.values():
        yield from found
    left = [use for use, found in edits.items() if not found and not is_checked_for(script, use.node)]
    places = [(_failing_of_slim(script, use) or _short(use.name), script.line(use.node)) for use in left]
    others = (use for use in script.uses if use.name.startswith("tf_slim."))
    places += [(name, script.line(use.node)) for use in others if (name := _failing_of_slim(script, use))]
    for one in imports:
        its = [use for use in script.uses if use.root == one.name and first_word(use.node) == one.bound]
        is_done = bool(its) and all(edits.get(use, not _is_ours(use.name)) for use in its)
        removal = list(_removed(script, one)) if is_done else []
        yield from removal
        is_told = any(edits.get(use) == [] and _short(use.name) != _short(one.name) for use in its)
        if one not in moved and not removal and not is_told and not is_guarded(script, one.node):
            nodes = (one.node, *(use.node for use in its if use.name == use.root))
            places += ((_short(one.name), script.line(node)) for node in nodes)
    if any(name == _HPARAMS for name, _ in places):
        places += _hparams_methods(script)
    # An import of slim is written once, above all its uses.
    slim = min((line for name, line in places if name == _SLIM), default=0)
    yield from at_first_lines(RULE, ((_message(name), line) for name, line in places if name != _SLIM or line == slim))


def _message(name: str) -> str:
    told = advice(name) or "copy what the script uses of it from TensorFlow 1.15 into the project"
    return f"{f'tf.contrib.{name}'.rstrip('.')} is not in TensorFlow 2: {told}."


def _failing_of_slim(script: Script, use: Use) -> str:
    """Return the name of a function of slim, or of tf_slim, that fails with TensorFlow 2.15; empty for other uses."""
    name = use.name.removeprefix("tf_").removeprefix(f"{_CONTRIB}.")
    call = script.call_of(use.node)
    keywords = {arg.keyword.value for arg in call.args if arg.keyword is not None} if call is not None else set()
    return name if name == "slim.batch_norm" or (name == _TRAIN_OP and keywords & _FAILING) else ""


def _hparams_methods(script: Script) -> Iterator[tuple[str, int]]:
    """Yield the calls of methods of HParams: those of objects that the script makes, or that have a name like them."""
    made = {
        dotted(target.target)
        for node in script.nodes(cst.Assign)
        if script.last_word(node.value) == "HParams"
        for target in node.targets
    }
    methods = {name.rpartition(".")[2]: name for name in ADVICE if name.startswith(f"{_HPARAMS}.")}
    for call, owner in script.methods(*methods):
        if dotted(owner) in made or _LIKE_HPARAMS.search(dotted(owner)):
            yield methods[method(call)[1]], script.line(call)


def _is_ours(name: str) -> bool:
    return name == _CONTRIB or (name.startswith(f"{_CONTRIB}.") and name.split(".")[2] not in _OTHERS)


def _short(name: str) -> str:
    """Return the part of a name that is reported once: a package, or a function of a module."""
    words = name.split(".")[2:]
    count = 1 if words[:1] == ["slim"] else 2
    while 1 < count < len(words) and words[count - 1] in _PACKAGES | {words[0]}:
        count += 1
    return ".".join(words[:count])


def _target(script: Script, one: Imported) -> tuple[str, str] | None:
    """Return the module and the name that an imported name can be imported from instead; None if there is none."""
    successor = SUCCESSORS.get(one.name[len(_CONTRIB) + 1 :])
    if successor is None or not isinstance(one.node, cst.ImportFrom):
        return None
    uses = [use for use in script.uses if use.root == one.name and first_word(use.node) == one.bound]
    whole = _reads(script, one.bound) == len(uses) and all(_suits(script, use.node, successor) for use in uses)
    if successor.keywords is not None and not whole:
        return None
    module, _, last = f"{successor.module or V1_MODULE}.{successor.name}".rpartition(".")
    return module, last


def _removed(script: Script, one: Imported) -> Iterator[Edit]:
    """Yield the removal of the import of a module; nothing if a read of the module is left."""
    uses = [use for use in script.uses if first_word(use.node) == one.bound and use.name != use.root]
    is_alone = not isinstance(one.node.names, cst.ImportStar) and len(one.node.names) == 1
    if is_alone and _reads(script, one.bound) == len(uses):
        yield from without_statement(script, one.node, RULE)


def _replaced(script: Script, use: Use) -> Iterator[Result]:
    """Yield the edit that replaces a use; nothing without a successor, or if the successor takes other arguments."""
    name = use.name[len(_CONTRIB) + 1 :]
    word = v1_alias(script, first_word(use.node)) if use.root == "tensorflow" else _top_word(script, use)
    found = find_successor(name)
    if found is None or not word:
        return
    known, successor = found
    node = without_last_words(use.node, name.count(".") - known.count("."))
    if _suits(script, node, successor):
        yield Edit(RULE, *script.span(node), f"{successor.module or word}.{successor.name}")
        if successor.module:
            yield NeededImport(RULE, successor.module)


def _suits(script: Script, node: cst.CSTNode, successor: Successor) -> bool:
    """Tell whether the successor accepts the arguments of a call, or what it decorates, with the same meaning."""
    if successor.keywords is None or (successor.positional and isinstance(script.parent(node), cst.Decorator)):
        return True
    call = script.call_of(node)
    if call is None or any(arg.star for arg in call.args):
        return False
    named = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    in_order = len(call.args) - len(named)
    ones = all(script.code(named[name]) == "-1" for name in successor.minus_ones & named.keys())
    known = successor.given <= named.keys() <= successor.keywords
    return known and ones and in_order <= successor.positional


def _top_word(script: Script, use: Use) -> str:
    """Return the expression for `tf.compat.v1` at a use; empty if TensorFlow may not be bound there."""
    tops = (one for one in script.imports if one.name == "tensorflow" and one.bound and script.is_top_level(one.node))
    first = next(tops, None)
    if first is None or script.span(first.node) > script.span(use.node):
        return ""
    known = {one.alias for one in script.imports if one.name == "tensorflow"}
    others = {each.node for bound in script.scopes.bound(first.bound).values() for each in bound} - known
    return "" if others else v1_alias(script, first.bound)


def _reads(script: Script, bound: str) -> int:
    """Return the number of uses of a word as a variable."""
    return sum(script.is_use(name) for name in script.nodes(cst.Name) if name.value == bound)
