"""R13, second part: names of `tf` that TensorFlow 2.15 does not have."""

from collections import defaultdict
from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported
from tfmp.migrate.analysis.guarded_imports import is_checked_for, is_guarded
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import (
    V1_MODULE,
    TfVersion,
    detect_version,
    is_explicit_v1,
    name_in_tensorflow,
    v1_aliases,
)
from tfmp.migrate.edits.results import Finding, Level, Options, Result
from tfmp.migrate.tables.api_names import Standing, standing

RULE = "R13"
_NOT_ATTRIBUTES = frozenset(("python", "core"))
_EXAMPLES = "tensorflow.examples is not in TensorFlow 2: keep a copy of what is used of it"
_OTHER_RULES = frozenset(("contrib", "compat", "keras"))


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report each unknown name once. The script would fail at these names only when it runs."""
    del options
    lines: dict[str, list[int]] = defaultdict(list)
    words = script.cached(v1_aliases)
    is_old = script.cached(detect_version).version in (TfVersion.V1, TfVersion.COMPAT_V1)
    for use in script.uses:
        name = name_in_tensorflow(use.name)
        if use.root != "tensorflow" or not _is_checked(name) or _is_expected(script, use.node):
            continue
        kind = standing(name)
        if kind is Standing.NEW and is_explicit_v1(use, words):
            lines[f"tf.compat.v1 has no {name}: write tf.compat.v2.{name}"].append(script.line(use.node))
        elif kind is Standing.MISSING:
            lines[_said(name)].append(script.line(use.node))
    for one in script.imports:
        name = name_in_tensorflow(one.name)
        if name.startswith("examples"):
            lines[_EXAMPLES].append(script.line(one.node))
        elif _is_imported(one) and standing(name) is Standing.MISSING and not is_guarded(script, one.node):
            is_ours = _is_checked(name) or (is_old and _is_of_keras(name))
            if is_ours:
                lines[_said(name)].append(script.line(one.node))
    for said, places in lines.items():
        count = f" ({len(places)} places)" if len(places) > 1 else ""
        yield Finding(RULE, min(places), Level.FAILS, f"{said}{count}.")


def _is_imported(one: Imported) -> bool:
    """Tell whether a `from` import takes a name from a public module, so that the table of names can judge it."""
    name = name_in_tensorflow(one.name)
    words = name.split(".")
    if not isinstance(one.node, cst.ImportFrom) or not one.bound or not _NOT_ATTRIBUTES.isdisjoint(words):
        return False
    is_plain = one.raw in (f"tensorflow.{name}", f"{V1_MODULE}.{name}")
    return is_plain and (len(words) == 1 or standing(words[0]) is Standing.UNTOLD)


def _is_of_keras(name: str) -> bool:
    return name.startswith("keras.") and not name.startswith("keras.mixed_precision.")


def _said(name: str) -> str:
    """Return the message for an unknown name, which is cut after its first unknown word."""
    words = name.split(".")
    if words[0] in _NOT_ATTRIBUTES:
        return f"tf.{words[0]} is no attribute of TensorFlow 2: import tensorflow.{words[0]}'s module by its name"
    counts = range(1, len(words) + 1)
    known = next(count for count in counts if standing(".".join(words[:count])) is Standing.MISSING)
    return f"tf.{'.'.join(words[:known])} is not in TensorFlow 2.15: misspelled, or removed"


def _is_checked(name: str) -> bool:
    """Tell whether this rule is responsible for a name."""
    first = name.partition(".")[0]
    return bool(first) and first not in _OTHER_RULES and "__" not in name


def _is_expected(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether the script sets the name itself, or handles its absence."""
    if isinstance(script.parent(node), cst.AssignTarget | cst.Del):
        return True
    tried = any(isinstance(above, cst.Try) and bool(above.handlers) for above in script.ancestors(node))
    return tried or is_checked_for(script, node)
