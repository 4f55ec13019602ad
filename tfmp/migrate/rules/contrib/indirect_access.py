"""R4: `tf.contrib.mixed_precision` through an alias, `getattr` or `importlib`."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import Use, dotted, first_word, literal_text, root_of, without_last_words
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import V1_MODULE, name_in_tensorflow
from tfmp.migrate.edits.import_edits import without_statement
from tfmp.migrate.edits.results import Edit, Finding, Level, NeededImport, Options, Result
from tfmp.migrate.rules.contrib.contrib_names import MODULE, NAMES
from tfmp.migrate.tables.api_names import Standing, standing

RULE = "R4"
_CONTRIB = "tensorflow.contrib"
_LOADERS = frozenset(("importlib.import_module", "importlib.util.find_spec", "__import__"))


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Replace plain aliases, and report every other way to the module."""
    del options
    for use in script.uses:
        if use.name not in (_CONTRIB, MODULE) or use.root not in ("tensorflow", _CONTRIB):
            continue
        edits = _followed(script, use)
        if edits:
            yield from edits
            yield NeededImport(RULE, "tfmp")
        else:
            yield _finding(script, use.node, dotted(use.node))
    yield from _by_text(script)
    yield from _unresolved(script)


def _finding(script: Script, node: cst.CSTNode, text: str) -> Finding:
    message = (
        f"indirect access: {text} is not in TensorFlow 2, and its use here cannot be followed. "
        f"For its mixed_precision write tfmp."
    )
    return Finding(RULE, script.line(node), Level.FAILS, message)


def _followed(script: Script, use: Use) -> list[Edit]:
    """Return the edits that replace an alias; empty if an edit cannot follow all uses of the alias."""
    assignment = _assignment(script, use)
    if assignment is None:
        return []
    statement, variable = assignment
    reads = script.reads_of(variable)
    if not reads:
        return []
    parts = [_attributes(script, read) for read in reads]
    before = () if use.name == MODULE else ("mixed_precision",)
    if not all(tuple(words[: len(before)]) == before and _has(words[len(before) :]) for _, words in parts):
        return []
    start, end = script.span(use.node)
    if use.name == MODULE:
        return [Edit(RULE, start, end, "tfmp")]
    removed = list(without_statement(script, statement, RULE))
    return removed and [*removed, *(Edit(RULE, *_module_span(script, node, words), "tfmp") for node, words in parts)]


def _has(words: Sequence[str]) -> bool:
    """Tell whether words start with a public name of tf.contrib.mixed_precision."""
    return bool(words) and words[0] in NAMES


def _assignment(script: Script, use: Use) -> tuple[cst.Assign, cst.Name] | None:
    """Return the assignment `name = use` that a use is the value of, with its variable; None for other uses."""
    above = script.parent(use.node)
    if not isinstance(above, cst.Assign) or len(above.targets) != 1:
        return None
    target = above.targets[0].target
    if not isinstance(target, cst.Name) or any(isinstance(node, cst.ClassDef) for node in script.ancestors(above)):
        return None
    return above, target


def _attributes(script: Script, name: cst.Name) -> tuple[cst.Name | cst.Attribute, list[str]]:
    """Return the whole dotted name that starts with a word, and the words that follow the first."""
    node = script.whole_name(name)
    return node, dotted(node).split(".")[1:]


def _module_span(script: Script, node: cst.Name | cst.Attribute, words: Sequence[str]) -> tuple[int, int]:
    return script.span(without_last_words(node, len(words) - 1))


def _by_text(script: Script) -> Iterator[Finding]:
    """Report `getattr(tf, "contrib")`, `hasattr(tf, "contrib")` and `import_module("tensorflow.contrib...")`."""
    for call in script.nodes(cst.Call):
        text = _first_text(call)
        of_tensorflow = len(call.args) > 1 and script.name_of(call.args[0].value) == "tensorflow"
        gets = dotted(call.func) == "getattr" and of_tensorflow
        asks = dotted(call.func) == "hasattr" and of_tensorflow
        if _loads(script, call) and f"{text}.".startswith(f"{_CONTRIB}."):
            yield _finding(script, call, text)
        elif gets and text == "contrib":
            yield _finding(script, call, f"{dotted(call.args[0].value)}.contrib")
        elif asks and text == "contrib":
            message = (
                f"TensorFlow 2 has no {dotted(call.args[0].value)}.contrib: code that runs only where it exists runs "
                "no more. Keep the branch that you want, without the condition."
            )
            yield Finding(RULE, script.line(call), Level.FAILS, message)


def _first_text(call: cst.Call) -> str:
    return next(filter(None, (literal_text(arg.value) for arg in call.args)), "")


def _loads(script: Script, call: cst.Call) -> bool:
    """Tell whether a call imports a module by its name as a string."""
    return script.name_of(call.func) in _LOADERS or dotted(call.func) == "__import__"


def _unresolved(script: Script) -> Iterator[Finding]:
    """Report attributes of names that may be TensorFlow, and `.contrib.mixed_precision` of any other object."""
    known = {root_of(use.node) for use in script.uses}
    for node in script.nodes(cst.Attribute):
        is_open = _is_of_contrib(node) and root_of(node) not in known
        if is_open and not any(isinstance(above, cst.Import | cst.ImportFrom) for above in script.ancestors(node)):
            yield _finding(script, node, script.code(node))
    unclear = [(use.node, name_in_tensorflow(use.name)) for use in script.ambiguous_uses if use.root == "tensorflow"]
    unclear += _loaded(script)
    contrib = [
        node for node, name in unclear if name.startswith("contrib.") and name.split(".")[1] != "mixed_precision"
    ]
    yield from (_finding(script, node, dotted(node)) for node in contrib)
    old = [node for node, name in unclear if standing(name) is Standing.OLD]
    if old:
        word = first_word(old[0])
        message = (
            f"{dotted(old[0])} is a name of TensorFlow 1, but {word} cannot be followed, because not only an import of "
            f"TensorFlow binds it: write `import {V1_MODULE} as {word}`, and bind {word} nowhere else."
        )
        yield Finding(RULE, script.line(old[0]), Level.FAILS, message)


def _is_of_contrib(node: cst.Attribute) -> bool:
    """Tell whether this is `x.contrib.mixed_precision`."""
    before = node.value
    named = node.attr.value == "mixed_precision" and isinstance(before, cst.Attribute)
    return named and cst.ensure_type(before, cst.Attribute).attr.value == "contrib"


def _loaded(script: Script) -> list[tuple[cst.Name | cst.Attribute, str]]:
    """Return the uses of variables that hold `importlib.import_module("tensorflow")`, with the words that follow."""
    names: set[str] = set()
    for statement in script.nodes(cst.Assign):
        call = statement.value
        if isinstance(call, cst.Call) and _loads(script, call) and _first_text(call) == "tensorflow":
            names.update(dotted(each.target) for each in statement.targets)
    found = []
    for name in (node for node in script.nodes(cst.Name) if node.value in names):
        node, words = _attributes(script, name)
        above = script.parent(name)
        if words and not (isinstance(above, cst.Attribute) and above.attr is name):
            found.append((node, ".".join(words)))
    return found
