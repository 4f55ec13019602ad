"""Tells scripts of TensorFlow 1 from scripts of TensorFlow 2."""

import enum
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.names import Imported, Use, dotted, first_word
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.tables.api_names import Standing, standing

V1_MODULE = "tensorflow.compat.v1"
# Both generations have these, but only a script of TensorFlow 2 lives by them.
_NEW_WORDS = frozenset(("GradientTape", "function"))
# What does something only in graphs. Other names of `tf.compat.v1` serve scripts that run eagerly as well.
_GRAPH_WORDS = frozenset(
    (
        *("Session", "InteractiveSession", "placeholder", "placeholder_with_default", "sparse_placeholder"),
        *("get_variable", "variable_scope", "global_variables_initializer", "local_variables_initializer"),
        *("reset_default_graph", "estimator", "layers", "disable_eager_execution", "disable_v2_behavior"),
    )
)
# What calls took in TensorFlow 1 alone.
_OLD_KEYWORDS = frozenset(("keep_dims", "reduction_indices", "keep_prob", "dimension", "collections", "squeeze_dims"))
_TAKEN_AWAY = "tensorflow.contrib.mixed_precision."
_NOT_PUBLIC = frozenset(("python", "core", "examples", "compat"))


class TfVersion(enum.Enum):
    """What a script was written for."""

    #: TensorFlow 1, by the names of its day: `tf` must be `tf.compat.v1`.
    V1 = enum.auto()
    #: TensorFlow 1, and it writes `tf.compat.v1` already.
    COMPAT_V1 = enum.auto()
    #: TensorFlow 2.
    V2 = enum.auto()
    #: It uses names that only the one has, beside names that only the other has.
    MIXED = enum.auto()
    #: It uses names that mean two things, and none that tells which.
    AMBIGUOUS = enum.auto()
    #: What it uses of TensorFlow, if anything, is the same in both.
    NEUTRAL = enum.auto()


class Mark(NamedTuple):
    """A name that tells what a script was written for.

    Attributes:
        node: Where it stands.
        name: What follows `tf.`.
        method: A method of what TensorFlow gives, `.numpy()`, in place of a name.
    """

    node: cst.CSTNode
    name: str
    method: str = ""

    @property
    def shown(self) -> str:
        """The mark as a script writes it."""
        return self.method or f"tf.{self.name}"


class DetectedVersion(NamedTuple):
    """What a script was written for, and by which names that is known.

    Attributes:
        version: What it was written for.
        old: Names that only TensorFlow 1 has.
        new: Names that only TensorFlow 2 has, or that only its scripts live by; without them and those of TensorFlow
            1 also what hardly any other script does.
        keras: Whether it uses `tf.keras`.
        graph: Whether it uses what does something only in graphs.
    """

    version: TfVersion
    old: tuple[Mark, ...]
    new: tuple[Mark, ...]
    keras: bool
    graph: bool


def detect_version(script: Script) -> DetectedVersion:
    """Tell what a script was written for.

    Args:
        script: The script.

    Example:
        >>> detect_version(Script('''import tensorflow as tf
        ... x = tf.placeholder(tf.float32)''')).version
        <TfVersion.V1: 1>
    """
    words = script.cached(v1_aliases)
    marks = [
        (Mark(use.node, name_in_tensorflow(use.name)), is_explicit_v1(use, words))
        for use in script.uses
        if _is_public(use.name)
    ]
    names = [(mark, explicit, standing(mark.name)) for mark, explicit in marks]
    contrib = tuple(_contrib(script))
    imported = tuple(_imported(script))
    old = tuple(mark for mark, explicit, kind in names if kind is Standing.OLD and not explicit)
    old += tuple(mark for mark in imported if standing(mark.name) is Standing.OLD)
    new = tuple(mark for mark, explicit, kind in names if kind is Standing.NEW and not explicit)
    new += tuple(mark for mark in imported if standing(mark.name) is Standing.NEW)
    new += tuple(mark for mark, *_ in names if mark.name.split(".")[0] in _NEW_WORDS)
    new += tuple(
        Mark(use.node, "compat.v2") for use in script.uses if f"{use.raw}.".startswith("tensorflow.compat.v2.")
    )
    ambiguous = [(mark, explicit) for mark, explicit, kind in names if kind is Standing.AMBIGUOUS and not explicit]
    old += tuple(mark for mark, _ in ambiguous if _is_called_as_of_old(script, mark.node))
    if ambiguous and not contrib:
        contrib = tuple(_npu(script))
    new = new or (() if old or contrib else tuple(_eager(script)))
    full = [*(use.name for use in script.uses), *(one.name for one in script.imports)]
    keras = any(name.startswith("tensorflow.keras") for name in full)
    explicit = bool(words) or any(explicit for _, explicit, _ in names)
    graph = any(explicit and _needs_graph(mark.name, kind) for mark, explicit, kind in names)
    version = _version(old, contrib, new, explicit=explicit, graph=graph, unclear=bool(ambiguous))
    version = _as_told(version, script.tensorflow, explicit=explicit)
    graph = graph or any(_needs_graph(mark.name, standing(mark.name)) for mark in old)
    return DetectedVersion(version, old or contrib, new, keras, graph)


def name_in_tensorflow(name: str) -> str:
    """Return what follows `tensorflow.` in a full name."""
    return name.partition(".")[2]


def is_explicit_v1(use: Use, words: set[str]) -> bool:
    """Tell whether a use means `tf.compat.v1` as it stands.

    Args:
        use: The use.
        words: The names that the script has for `tf.compat.v1`, by any import.
    """
    return f"{use.raw}.".startswith(f"{V1_MODULE}.") or first_word(use.node) in words


def v1_aliases(script: Script) -> set[str]:
    """Return the names that a script has for `tf.compat.v1`, by any import.

    `import tensorflow.compat.v1` binds the name of the whole package: it is none of them.
    """
    return {one.bound for one in script.imports if one.raw == V1_MODULE and one.bound and not _binds_the_package(one)}


def v1_alias(script: Script, detected: DetectedVersion, bound: str) -> str:
    """Return what the script will have for `tf.compat.v1`, where it has a name for TensorFlow.

    Args:
        script: The script.
        detected: What it was written for.
        bound: The name: `tf`.
    """
    plain = any(one.raw == "tensorflow" and one.bound == bound for one in script.imports)
    moved = (
        detected.version is TfVersion.V1
        and plain
        and (bound != "tensorflow" or not imports_rebinding_tensorflow(script))
    )
    return bound if moved or bound in script.cached(v1_aliases) else f"{bound}.compat.v1"


def imports_rebinding_tensorflow(script: Script) -> list[Imported]:
    """Return the imports of submodules that bind the name `tensorflow`, but for those that R3 takes away."""
    others = (one for one in script.imports if one.bound == "tensorflow" and one.raw not in ("tensorflow", V1_MODULE))
    return [one for one in others if not f"{one.name}.".startswith(_TAKEN_AWAY)]


def _version(
    old: tuple[Mark, ...],
    contrib: tuple[Mark, ...],
    new: tuple[Mark, ...],
    *,
    explicit: bool,
    graph: bool,
    unclear: bool,
) -> TfVersion:
    if new:
        return TfVersion.MIXED if old or contrib else TfVersion.V2
    if old or (contrib and not explicit):
        return TfVersion.V1
    if graph or contrib:
        return TfVersion.COMPAT_V1
    return TfVersion.NEUTRAL if explicit or not unclear else TfVersion.AMBIGUOUS


def _as_told(version: TfVersion, tensorflow: int | None, *, explicit: bool) -> TfVersion:
    """Return the generation of a script that tells none by itself, where the scripts around it do."""
    if tensorflow is None or version not in (TfVersion.AMBIGUOUS, TfVersion.NEUTRAL):
        return version
    if tensorflow == 2:
        return TfVersion.NEUTRAL
    return TfVersion.COMPAT_V1 if explicit else TfVersion.V1


def _is_called_as_of_old(script: Script, node: cst.CSTNode) -> bool:
    call = script.call_of(node)
    return call is not None and any(arg.keyword is not None and arg.keyword.value in _OLD_KEYWORDS for arg in call.args)


def _npu(script: Script) -> Iterator[Mark]:
    """Return the imports of the NPU bridge, which was for TensorFlow 1."""
    for imported in script.imports:
        if imported.name.split(".")[0] == "npu_bridge":
            yield Mark(imported.node, "", imported.raw)


def _eager(script: Script) -> Iterator[Mark]:
    """Return what both generations have, but hardly any script of graphs uses."""
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


def _needs_graph(name: str, kind: Standing) -> bool:
    first = name.partition(".")[0]
    return first in _GRAPH_WORDS or (first == "train" and kind is Standing.OLD)


def _is_public(name: str) -> bool:
    first, _, rest = name.partition(".")
    return first == "tensorflow" and bool(rest) and rest.split(".")[0] not in {*_NOT_PUBLIC, "contrib", "keras"}


def _binds_the_package(imported: Imported) -> bool:
    return isinstance(imported.node, cst.Import) and any(
        dotted(alias.name) == imported.raw and alias.asname is None for alias in imported.node.names
    )


def _contrib(script: Script) -> Iterator[Mark]:
    for use in script.uses:
        if f"{use.name}.".startswith("tensorflow.contrib."):
            yield Mark(use.node, name_in_tensorflow(use.name))
    for imported in script.imports:
        if f"{imported.name}.".startswith("tensorflow.contrib."):
            yield Mark(imported.node, name_in_tensorflow(imported.name))


def _imported(script: Script) -> Iterator[Mark]:
    """Return what `from tensorflow import X` and `from tensorflow.M import X` name."""
    for imported in script.imports:
        if isinstance(imported.node, cst.ImportFrom) and imported.bound and _is_public(imported.raw):
            yield Mark(imported.node, name_in_tensorflow(imported.raw))
