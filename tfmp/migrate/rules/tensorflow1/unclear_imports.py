"""R4: names of TensorFlow 1 behind a `tf` that no plain import binds."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted, is_tensorflow, root_of
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import is_checked_for
from tfmp.migrate.edits.results import Finding, Level, Result
from tfmp.migrate.tables.api_names import Standing, standing
from tfmp.migrate.tables.contrib_successors import is_package

RULE = "R4"
_WORDS = ("tf", "tensorflow")
_HANDLED = ("npu_bridge", "tensorflow")
# Other packages that have a module `contrib`.
_OTHERS = frozenset(("django", "mxnet", "paddle", "sklearn"))
_MESSAGE = (
    "TensorFlow 2 does not have these names, and the rewriter leaves them alone because no plain import binds the name "
    "in front of them: it comes from another file, or the script binds it in several places. Write `import "
    "tensorflow.compat.v1 as tf` below the imports, bind tf nowhere else, and run the rewriter again."
)


def report(script: Script) -> Iterator[Result]:
    """Report the names once, at the first of them."""
    known = {root_of(use.node) for use in script.uses if is_tensorflow(use.root)}
    ambiguous = {root_of(use.node) for use in script.ambiguous_uses if use.root == "tensorflow"}
    stars = [dotted(node.module) for node in script.nodes(cst.ImportFrom) if isinstance(node.names, cst.ImportStar)]
    # R5 handles the star imports of the NPU bridge, and R1 those of TensorFlow.
    left_out = set(script.scopes.unbound()) if stars and all(star.startswith(_HANDLED) for star in stars) else set()
    found: dict[str, int] = {}
    for node in script.nodes(cst.Attribute):
        root, above = root_of(node), script.parent(node)
        is_part = isinstance(above, cst.Attribute) or (isinstance(root, cst.Name) and not script.is_use(root))
        if is_part or root in known:
            continue
        names = [words for words in _meanings(script, node) if root not in left_out or words[:2] == ["tf", "contrib"]]
        is_old = root in ambiguous and standing(".".join(_words(node)[1:])) is Standing.OLD
        if (is_old or any(map(_is_old, names))) and not is_checked_for(script, node):
            found.setdefault(script.code(node), script.line(node))
    if found:
        listed = ", ".join(f"{name} in line {line}" for name, line in found.items())
        yield Finding(RULE, min(found.values()), Level.FAILS, _MESSAGE, f"The names are {listed}.")


def _meanings(script: Script, node: cst.Attribute) -> Iterator[list[str]]:
    """Yield the words of a chain of attributes, as it is written and as an import names its first word."""
    words, root = _words(node), root_of(node)
    bound = [each.node for each in script.scopes.bindings(root, earlier=False)] if isinstance(root, cst.Name) else []
    aliases = [each for each in bound if isinstance(each, cst.ImportAlias) and each.asname is not None]
    yield from ([*alias.evaluated_name.split("."), *words[1:]] for alias in aliases)
    if not any(isinstance(script.parent(alias), cst.Import) for alias in aliases):
        yield words


def _words(node: cst.BaseExpression) -> list[str]:
    """Return the words of a chain of attributes; the first is empty if the chain starts at no name."""
    words = []
    while isinstance(node, cst.Attribute):
        words.append(node.attr.value)
        node = node.value
    return [dotted(node), *words[::-1]]


def _is_old(words: Sequence[str]) -> bool:
    """Tell whether a chain leads to a name of TensorFlow 1: behind a `tf`, a `contrib` or a `train` anywhere in it."""
    for count, word in enumerate(words[:-1], 1):
        rest = words[count:]
        if word in _WORDS:
            return (rest[0] == "contrib" and len(rest) > 1) or standing(".".join(rest)) is Standing.OLD
        if word == "contrib" and words[0] not in _OTHERS and is_package(rest[0]):
            return True
        if word == "train" and rest[0].endswith("Optimizer") and standing(f"train.{rest[0]}") is Standing.OLD:
            return True
    return False
