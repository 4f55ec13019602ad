"""R14: names of `tf.estimator` that exist without Estimator are replaced; the others are listed."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, first_word, without_last_words
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import V1_MODULE, TfVersion, detect_version, name_in_tensorflow, v1_alias
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, Result
from tfmp.migrate.tables.api_names import Standing, differs, standing
from tfmp.migrate.tables.contrib_successors import find_successor

RULE = "R14"
_OF_KERAS_2 = ("layers.", "nn.rnn_cell.", "keras.")
_NEEDS_ESTIMATOR = (
    "The script needs TensorFlow 2.15, the last version with Estimator. Later versions do not have these names."
)
_NEEDS_KERAS_2 = (
    "The script needs TensorFlow 2.15. A later version also runs it if the package tf_keras is installed and the "
    "environment variable TF_USE_LEGACY_KERAS is 1, because these names need Keras 2."
)


def rewrite(script: Script) -> Iterator[Result]:
    """Replace the hooks of `tf.estimator`, and list the names that later TensorFlow versions do not have."""
    is_old = script.cached(detect_version).version is TfVersion.V1
    left = []
    for use in script.uses:
        name = _name_after_the_other_rules(name_in_tensorflow(use.name))
        hook = name.split(".")[1] if name.startswith("estimator.") else ""
        if use.root == "tensorflow" and name_in_tensorflow(use.name) == name and is_hook(hook):
            start, end = script.span(without_last_words(use.node, name.count(".") - 1))
            yield Edit(RULE, start, end, f"{v1_alias(script, first_word(use.node))}.train.{hook}")
        elif _is_module(use.root) and name.startswith(("estimator.", "layers.", "nn.rnn_cell.")):
            left.append((script.line(use.node), ".".join(name.split(".")[: 3 if name.startswith("nn.") else 2])))
    for one in script.imports:
        module, _, name = one.name.rpartition(".") if one.bound else (one.name, "", "*")
        if isinstance(one.node, cst.ImportFrom) and module == "tensorflow.estimator" and is_hook(name):
            yield MovedNames(RULE, one.node, {name: (f"{V1_MODULE}.train", name)})
        elif isinstance(one.node, cst.ImportFrom) and module == "tensorflow.estimator":
            left.append((script.line(one.node), f"estimator.{name}"))
        elif _is_of_old_keras(one, is_old):
            left.append((script.line(one.node), name_in_tensorflow(one.name)))
    yield from _listed(left)


def is_hook(name: str) -> bool:
    """Tell whether a name of `tf.estimator` is also one of `tf.compat.v1.train`: both modules have the same objects."""
    return standing(f"train.{name}") is Standing.OLD


def _is_of_old_keras(one: Imported, is_old: bool) -> bool:
    """Tell whether an import is from `tensorflow.compat.v1.keras` now, or after R1. Keras 3 has no such module."""
    name = name_in_tensorflow(one.name)
    by_name = isinstance(one.node, cst.ImportFrom) or one.bound != "tensorflow"
    is_v1 = one.raw.startswith(V1_MODULE) or (is_old and differs(name) and bool(one.bound))
    is_keras = name.startswith("keras.") and not name.startswith("keras.mixed_precision")
    return is_keras and by_name and is_v1


def _is_module(root: str) -> bool:
    """Tell whether a use starts at TensorFlow, or at a module whose names this rule lists."""
    if root.startswith("tensorflow.contrib"):
        # A name that is imported by itself gets a new import, so it needs no listing.
        return root.count(".") <= 2
    return root in ("tensorflow", "tensorflow.estimator", "tensorflow.layers")


def _name_after_the_other_rules(name: str) -> str:
    """Return the name that R13 writes for a name of `tf.contrib`; other names are returned unchanged."""
    found = find_successor(name.removeprefix("contrib.")) if name.startswith("contrib.") else None
    return name if found is None or found[1].module else found[1].name


def _listed(left: Sequence[tuple[int, str]]) -> Iterator[Finding]:
    """Report all names that a later TensorFlow does not have, in one finding for the script."""
    names = sorted({name for _, name in left}, key=lambda name: (name.startswith(_OF_KERAS_2), name))
    if names:
        message = _NEEDS_KERAS_2 if names[0].startswith(_OF_KERAS_2) else _NEEDS_ESTIMATOR
        detail = f"The names are {', '.join(f'tf.{name}' for name in names)}."
        yield Finding(RULE, min(line for line, _ in left), Level.NOTE, message, detail)
