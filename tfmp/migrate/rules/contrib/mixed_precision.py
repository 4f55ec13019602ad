"""R2, R3: the names of `tf.contrib.mixed_precision` come from tfmp."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, without_last_words
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, Finding, Level, MovedNames, NeededImport, Result

MODULE = "tensorflow.contrib.mixed_precision"
_NAMES = ("ExponentialUpdateLossScaleManager", "FixedLossScaleManager", "LossScaleManager", "LossScaleOptimizer")
# Every public name of these modules is also a name of tfmp.
_MODULES = (MODULE, *(f"{MODULE}.python{part}" for part in ("", ".loss_scale_manager", ".loss_scale_optimizer")))
_UNKNOWN = f"tf.contrib.mixed_precision never had this name. Its names, which tfmp has too, are {', '.join(_NAMES)}."
_STAR = (
    "A star import from tf.contrib.mixed_precision, which is not in TensorFlow 2. Import the names that the script "
    f"uses from tfmp. The names are {', '.join(_NAMES)}."
)
_WITHOUT_AS = (
    "tf.contrib.mixed_precision is not in TensorFlow 2, so this import fails. It also binds the name tensorflow: write "
    "`import tensorflow.compat.v1 as tensorflow` in its place if the script uses that name, and else remove it."
)


def rewrite(script: Script) -> Iterator[Result]:
    """Replace the names and their imports, and report names that never existed."""
    for use in script.uses:
        words = use.name[len(MODULE) + 1 :].split(".")
        if use.root in ("tensorflow", "tensorflow.contrib") and f"{use.name}.".startswith(f"{MODULE}."):
            if words[0] in ("", *_NAMES):
                node = without_last_words(use.node, len(words) - 1)
                yield Edit("R2", *script.span(node), f"tfmp.{words[0]}".rstrip("."))
                yield NeededImport("R2", "tfmp")
            else:
                yield _unknown(script, "R2", use.node, words[0])
        elif use.root in _MODULES and use.name != use.root:
            name = use.name[len(use.root) + 1 :].split(".")[0]
            if name not in _NAMES:
                yield _unknown(script, "R3", use.node, name)
    for one in script.imports:
        if f"{one.name}.".startswith(f"{MODULE}."):
            yield from _imported(script, one)


def _imported(script: Script, one: Imported) -> Iterator[Result]:
    node, (module, _, name) = one.node, one.name.rpartition(".")
    if one.alias is None:
        yield Finding("R3", script.line(node), Level.FAILS, _STAR)
    elif one.name in _MODULES and isinstance(node, cst.ImportFrom):
        yield MovedNames("R3", node, {name: ("", "tfmp")})
    elif one.name in _MODULES and one.alias.asname is None:
        yield Finding("R3", script.line(node), Level.FAILS, _WITHOUT_AS)
    elif one.name in _MODULES:
        yield Edit("R3", *script.span(one.alias.name), "tfmp")
    elif isinstance(node, cst.ImportFrom) and module in _MODULES and name in _NAMES:
        yield MovedNames("R3", node, {name: ("tfmp", name)})
    elif isinstance(node, cst.ImportFrom) and module in _MODULES:
        yield _unknown(script, "R3", node, name)


def _unknown(script: Script, rule: str, node: cst.CSTNode, name: str) -> Finding:
    return Finding(rule, script.line(node), Level.FAILS, _UNKNOWN, f"The name is {name}.")
