"""R13, second part: names that TensorFlow 2.15 does not have."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, Use
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import (
    V1_MODULE,
    TfVersion,
    detect_version,
    is_checked_for,
    is_expected,
    is_explicit_v1,
    is_guarded,
    name_in_tensorflow,
    v1_aliases,
)
from tfmp.migrate.edits.results import Result, at_first_lines
from tfmp.migrate.tables import starts
from tfmp.migrate.tables.api_names import Standing, standing, successor
from tfmp.migrate.tables.python_names import missing_part, replacement

RULE = "R13"
_PYTHON = "tensorflow.python."
_NOT_ATTRIBUTES = frozenset(("python", "core"))
_EXAMPLES = "tensorflow.examples is not in TensorFlow 2. Copy what the script uses of it into the project."
_OTHER_RULES = frozenset(("contrib", "compat", "keras"))


def report(script: Script) -> Iterator[Result]:
    """Report each unknown name once, with its lines. The script would fail at these names only when it runs."""
    places: list[tuple[str, int]] = []
    guarded = {one.name for one in script.imports if _is_guarded(script, one)}
    for use in script.uses:
        if use.root not in guarded and not is_expected(script, use.node):
            places.append((_of_use(script, use), script.line(use.node)))
    for one in script.imports:
        if not _is_guarded(script, one):
            places.append((_of_import(script, one), script.line(one.node)))
    yield from at_first_lines(RULE, ((message, line) for message, line in places if message))


def _of_use(script: Script, use: Use) -> str:
    """Return the message for a use; empty if TensorFlow has the name."""
    name = name_in_tensorflow(use.name)
    # An `import tensorflow.python...` binds the name tensorflow.
    modules = [use.root, *(one.name for one in script.imports if one.bound == "tensorflow")]
    if use.name.startswith(_PYTHON) and any(module.startswith(_PYTHON) for module in modules):
        return _of_python(use.name[len(_PYTHON) :])
    if use.root != "tensorflow" or not _is_checked(name):
        return ""
    kind = standing(name)
    if kind is Standing.NEW and is_explicit_v1(use, script.cached(v1_aliases)):
        return f"tf.compat.v1 does not have {name}, which is a name of TensorFlow 2. Write tf.compat.v2.{name}."
    return _of_missing(name) if kind is Standing.MISSING else ""


def _of_import(script: Script, one: Imported) -> str:
    """Return the message for an import; empty if TensorFlow has the name."""
    name = name_in_tensorflow(one.name)
    words = name.split(".")
    if one.name.startswith("tensorflow.examples"):
        return _EXAMPLES
    if one.name.startswith(_PYTHON):
        return _of_python(one.name[len(_PYTHON) :])
    # The table can judge only names that a `from` import takes from a public module.
    is_plain = one.raw in (f"tensorflow.{name}", f"{V1_MODULE}.{name}") and isinstance(one.node, cst.ImportFrom)
    is_module = len(words) == 1 or standing(words[0]) in (Standing.UNTOLD, Standing.OLD)
    if not is_plain or not is_module or not one.bound or not _NOT_ATTRIBUTES.isdisjoint(words):
        return ""
    is_old = script.cached(detect_version).version in (TfVersion.V1, TfVersion.COMPAT_V1)
    is_old_keras = is_old and name.startswith("keras.") and not name.startswith("keras.mixed_precision.")
    is_ours = _is_checked(name) or is_old_keras
    return _of_missing(name) if is_ours and standing(name) is Standing.MISSING else ""


def _of_missing(name: str) -> str:
    """Return the message for an unknown name, which is cut after its first unknown word."""
    words = name.split(".")
    if words[0] in _NOT_ATTRIBUTES:
        module = f"tensorflow.{words[0]}"
        return (
            f"{module} is not an attribute of TensorFlow 2. Import what is used of it: `from {module}.<module> import`."
        )
    missing = next(part for part in starts(name) if standing(part) is Standing.MISSING)
    instead = successor(missing)
    word = "tf.compat.v2" if standing(instead) is Standing.NEW else "tf"
    told = f" Write {word}.{instead} if that is what it means." if instead else ""
    return f"tf.{missing} is not in TensorFlow 2.15: it is misspelled, or was removed.{told}"


def _of_python(name: str) -> str:
    missing = missing_part(name)
    if not missing:
        return ""
    instead = replacement(missing)
    told = f"Write {instead} in its place." if instead else "It has no public successor: write it out in the project."
    return f"{_PYTHON}{missing} is not in TensorFlow 2.15, as tensorflow.python is private and changes. {told}"


def _is_checked(name: str) -> bool:
    """Tell whether this rule is responsible for a public name."""
    words = name.split(".")
    return words[0] not in ("", *_OTHER_RULES) and not any(word.startswith("_") for word in words)


def _is_guarded(script: Script, one: Imported) -> bool:
    return is_guarded(script, one.node) or is_checked_for(script, one.node)
