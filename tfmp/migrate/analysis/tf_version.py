"""Detects whether a script was written for TensorFlow 1 or for TensorFlow 2."""

import enum
import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, Use, dotted, first_word, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.tables.api_names import Standing, standing

V1_MODULE = "tensorflow.compat.v1"
# TensorFlow 1.15 has these names too, but only scripts for TensorFlow 2 use them in practice.
_NEW_WORDS = frozenset(("GradientTape", "function"))
# Names that work only in graph mode. Other names of `tf.compat.v1` also serve scripts that run eagerly.
_GRAPH_WORDS = frozenset(
    (
        *("Session", "InteractiveSession", "placeholder", "placeholder_with_default", "sparse_placeholder"),
        *("get_variable", "variable_scope", "global_variables_initializer", "local_variables_initializer"),
        *("reset_default_graph", "estimator", "layers", "disable_eager_execution", "disable_v2_behavior"),
    )
)
# Keyword arguments that only TensorFlow 1 accepts.
_OLD_KEYWORDS = frozenset(("keep_dims", "reduction_indices", "keep_prob", "dimension", "collections", "squeeze_dims"))
_OF_R3 = "tensorflow.contrib.mixed_precision."
_MAIN = re.compile(r"""\(?\s*(__name__\s*==\s*["']__main__["']|["']__main__["']\s*==\s*__name__)\s*\)?""")
_NOT_PUBLIC = frozenset(("python", "core", "examples", "compat"))
# Calls that run a program: nearly all of them start a session.
_STARTS = frozenset(
    f"tensorflow.{name}"
    for name in (
        *("app.run", "test.main", "Session", "InteractiveSession", "estimator.train_and_evaluate"),
        *("train.MonitoredTrainingSession", "train.MonitoredSession", "train.SingularMonitoredSession"),
        *("train.Supervisor", "train.SessionManager", "contrib.slim.learning.train", "contrib.training.train"),
    )
) | {"absl.app.run", "tf_slim.learning.train", "tf_slim.training.train"}
_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
# Matches a condition that checks for a name or for a version, but not `FLAGS.version_2_with_negative`.
_LOOKS = re.compile(r"hasattr\(|\bdir\(|version(__|_info)?\b", re.IGNORECASE)


class TfVersion(enum.Enum):
    """The TensorFlow version that a script was written for."""

    V1 = enum.auto()  #: TensorFlow 1, with names that must become names of `tf.compat.v1`.
    COMPAT_V1 = enum.auto()  #: TensorFlow 1, already written with `tf.compat.v1`.
    V2 = enum.auto()  #: TensorFlow 2.
    MIXED = enum.auto()  #: Some names are only in TensorFlow 1, and others only in TensorFlow 2.
    AMBIGUOUS = enum.auto()  #: Some names differ between the versions, and no name shows which version is meant.
    NEUTRAL = enum.auto()  #: All names of TensorFlow, if any, are the same in both versions.


class Mark(NamedTuple):
    """A use of a name that shows which version a script was written for."""

    node: cst.CSTNode
    name: str  #: The words after `tf.`.
    method: str = ""  #: In place of a name, a method call on a tensor such as `.numpy()`, or an imported module.

    @property
    def shown(self) -> str:
        """The text by which messages show the mark."""
        return self.method or f"tf.{self.name}"


class DetectedVersion(NamedTuple):
    """The detected version of a script, with the names that are the evidence for it."""

    version: TfVersion
    old: tuple[Mark, ...]  #: Uses of names that only TensorFlow 1 has.
    #: Uses of names that only TensorFlow 2 has, or that only its scripts use in practice. If neither version has such
    #: uses: weak hints such as `.numpy()`.
    new: tuple[Mark, ...]
    keras: bool  #: True if the script uses `tf.keras`.
    graph: bool  #: True if the script uses names that work only in graph mode.


def detect_version(script: Script) -> DetectedVersion:
    """Detect which TensorFlow version a script was written for."""
    words = script.cached(v1_aliases)
    uses = {Mark(use.node, name_in_tensorflow(use.name)): use for use in script.uses if _is_public(use.name)}
    explicit = [mark for mark, use in uses.items() if is_explicit_v1(use, words)]
    plain = [mark for mark, use in uses.items() if not is_explicit_v1(use, words)]
    shown = [*plain, *_imported(script)]
    ambiguous = [mark for mark in plain if standing(mark.name) is Standing.AMBIGUOUS]
    v2 = (use for use in script.uses if f"{use.raw}.".startswith("tensorflow.compat.v2."))
    old = (
        *(mark for mark in shown if standing(mark.name) is Standing.OLD),
        *(mark for mark in ambiguous if _is_called_as_of_old(script, mark.node)),
    )
    new: tuple[Mark, ...] = (
        *(mark for mark in shown if standing(mark.name) is Standing.NEW),
        *(mark for mark in uses if mark.name.partition(".")[0] in _NEW_WORDS),
        *(Mark(use.node, "compat.v2") for use in v2),
    )
    contrib = tuple(_below(script, "tensorflow.contrib"))
    if ambiguous and not contrib:
        # The NPU bridge existed only for TensorFlow 1.
        contrib = tuple(_below(script, "npu_bridge"))
    new = new or (() if old or contrib else tuple(_eager(script)))
    keras = any(one.name.startswith("tensorflow.keras") for one in uses_and_imports(script))
    is_explicit, graph = bool(words or explicit), any(map(_needs_graph, explicit))
    if new:
        version = TfVersion.MIXED if old or contrib else TfVersion.V2
    elif old or (contrib and not is_explicit):
        version = TfVersion.V1
    elif graph or contrib:
        version = TfVersion.COMPAT_V1
    elif script.tensorflow == 1:
        version = TfVersion.COMPAT_V1 if is_explicit else TfVersion.V1
    elif script.tensorflow == 2 or not ambiguous or is_explicit:
        version = TfVersion.NEUTRAL
    else:
        version = TfVersion.AMBIGUOUS
    return DetectedVersion(version, old or contrib, new, keras, graph or any(map(_needs_graph, old)))


def uses_and_imports(script: Script) -> list[Use | Imported]:
    """Return the uses of imported names, and the imports."""
    return [*script.uses, *script.imports]


def name_in_tensorflow(name: str) -> str:
    """Return the part of a full name after its first word, `tensorflow`."""
    return name.partition(".")[2]


def is_explicit_v1(use: Use, words: set[str]) -> bool:
    """Tell whether a use already goes through `tf.compat.v1`, given the names that imports bind to `tf.compat.v1`."""
    return f"{use.raw}.".startswith(f"{V1_MODULE}.") or first_word(use.node) in words


def v1_aliases(script: Script) -> set[str]:
    """Return the names that imports and assignments of a script bind to `tf.compat.v1`."""
    assigned = {word for alias in script.aliases if alias.module == V1_MODULE for word in alias.words}
    return assigned | {one.bound for one in script.imports if one.module == V1_MODULE}


def v1_alias(script: Script, bound: str) -> str:
    """Return the expression for `tf.compat.v1` after the rewrite, given the script's name for TensorFlow."""
    imported = imported_word(script, bound)
    plain = any(one.raw == "tensorflow" and one.bound == imported for one in script.imports)
    is_free = imported != "tensorflow" or not imports_rebinding_tensorflow(script)
    moved = plain and is_free and script.cached(detect_version).version is TfVersion.V1
    return bound if moved or bound in script.cached(v1_aliases) else f"{bound}.compat.v1"


def imported_word(script: Script, word: str) -> str:
    """Return the word from which a word has its meaning, by one or several assignments; the word itself if by none."""
    assigned = {each: alias.of for alias in script.aliases for each in alias.words if alias.of}
    chain = [word]
    while chain[-1] in assigned and assigned[chain[-1]] not in chain:
        chain.append(assigned[chain[-1]])
    return chain[-1]


def imports_rebinding_tensorflow(script: Script) -> list[Imported]:
    """Return the imports of submodules that bind the name `tensorflow`, except those that R3 reports."""
    others = (one for one in script.imports if one.bound == "tensorflow" and one.raw not in ("tensorflow", V1_MODULE))
    return [one for one in others if not f"{one.name}.".startswith(_OF_R3)]


def is_guarded(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether an import is in the body of a `try` whose `except` catches a failed import."""
    for above, part in script.around(node):
        if isinstance(above, cst.FunctionDef):
            return False
        if isinstance(above, cst.Try) and above.body is part and any(map(_catches_imports, above.handlers)):
            return True
    return False


def is_checked_for(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether a name is used only under a condition that checks for the name or for a version."""
    conditions = (above.test for above in script.ancestors(node) if isinstance(above, cst.If | cst.IfExp))
    return any(_LOOKS.search(script.code(test)) for test in conditions)


def is_expected(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether the script sets the name itself, or handles its absence."""
    if isinstance(script.parent(node), cst.AssignTarget | cst.Del):
        return True
    tried = any(isinstance(above, cst.Try) and bool(above.handlers) for above in script.ancestors(node))
    return tried or is_checked_for(script, node)


def is_run(script: Script) -> bool:
    """Tell whether a script is run as a program, and not only imported.

    A program has a main block, or starts a session at its top level: in its statements, or in functions and methods of
    its own that these call. Methods are known by their names.
    """
    if any(asks_for_main(script, node) for node in script.module.body):
        return True
    called: dict[str, set[str]] = {}
    for call in script.nodes(cst.Call):
        name = script.name_of(call.func) or method(call)[1] or dotted(call.func)
        called.setdefault(_definition_around(script, call), set()).add(name)
    reached, new = {""}, {""}
    while new:
        new = {name for one in new for name in called.get(one, ())} - reached
        reached |= new
    return not _STARTS.isdisjoint(reached)


def asks_for_main(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether a statement is an `if` that tests `__name__ == "__main__"`."""
    return isinstance(node, cst.If) and _MAIN.fullmatch(script.code(node.test)) is not None


def _definition_around(script: Script, node: cst.CSTNode) -> str:
    """Return the name of the outermost function, method or class around a node; empty at the top level of the script.

    `__init__` is known by the name of its class, which calls it.
    """
    kinds = (cst.FunctionDef, cst.ClassDef, cst.Lambda)
    around = [above for above in script.ancestors(node) if isinstance(above, kinds)][::-1]
    names = ["lambda" if isinstance(above, cst.Lambda) else above.name.value for above in around]
    is_method = len(names) > 1 and isinstance(around[0], cst.ClassDef) and names[1] != "__init__"
    return names[is_method] if names else ""


def _is_called_as_of_old(script: Script, node: cst.CSTNode) -> bool:
    call = script.call_of(node)
    return call is not None and any(arg.keyword is not None and arg.keyword.value in _OLD_KEYWORDS for arg in call.args)


def _below(script: Script, package: str) -> Iterator[Mark]:
    """Yield the uses of names of a package, and its imports."""
    for one in uses_and_imports(script):
        if f"{one.name}.".startswith(f"{package}."):
            yield Mark(one.node, name_in_tensorflow(one.name), "" if package.startswith("tensorflow") else one.raw)


def _eager(script: Script) -> Iterator[Mark]:
    """Yield uses that both versions allow, but that are rare outside eager scripts for TensorFlow 2."""
    roots = {imported.name.split(".")[0] for imported in script.imports}
    if "tensorflow" not in roots:
        return
    for use in script.uses:
        if use.name == "tensorflow.Module":
            yield Mark(use.node, "Module")
    if "torch" in roots:
        return
    for call in script.nodes(cst.Call):
        if not call.args and isinstance(call.func, cst.Attribute) and call.func.attr.value == "numpy":
            yield Mark(call, "", ".numpy()")


def _needs_graph(mark: Mark) -> bool:
    first = mark.name.partition(".")[0]
    return first in _GRAPH_WORDS or (first == "train" and standing(mark.name) is Standing.OLD)


def _is_public(name: str) -> bool:
    first, _, rest = name.partition(".")
    return first == "tensorflow" and bool(rest) and rest.split(".")[0] not in {*_NOT_PUBLIC, "contrib", "keras"}


def _imported(script: Script) -> Iterator[Mark]:
    """Yield the names that `from tensorflow import X` and `from tensorflow.M import X` import."""
    for imported in script.imports:
        if isinstance(imported.node, cst.ImportFrom) and imported.bound and _is_public(imported.raw):
            yield Mark(imported.node, name_in_tensorflow(imported.raw))


def _catches_imports(handler: cst.ExceptHandler) -> bool:
    types = handler.type.elements if isinstance(handler.type, cst.Tuple) else [handler.type]
    names = [dotted(one.value if isinstance(one, cst.BaseElement) else one) for one in types]
    return handler.type is None or any(name in _ERRORS for name in names)
