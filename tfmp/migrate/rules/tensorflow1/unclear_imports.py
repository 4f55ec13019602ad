"""R4: names of TensorFlow 1 behind a `tf` that no plain import binds."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted, root_of
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import is_checked_for
from tfmp.migrate.edits.results import Finding, Level, Result
from tfmp.migrate.tables.api_names import Standing, standing

RULE = "R4"
_WORDS = ("tf", "tensorflow")
_MESSAGE = (
    "TensorFlow 2 does not have these names, and the rewriter leaves them alone because no plain import binds the name "
    "in front of them: it comes from a star import, or the script binds it in several places. Write `import "
    "tensorflow.compat.v1 as tf` below the imports, bind tf nowhere else, and run the rewriter again."
)


def report(script: Script) -> Iterator[Result]:
    """Report the names once, at the first of them."""
    bound = {root_of(use.node) for use in script.uses}
    ambiguous = {root_of(use.node) for use in script.ambiguous_uses if use.root == "tensorflow"}
    imports = script.nodes(cst.ImportFrom)
    # R5 handles the star imports of the NPU bridge.
    modules = [dotted(node.module) for node in imports if isinstance(node.names, cst.ImportStar)]
    stars = [module for module in modules if not module.startswith("npu_bridge")]
    free = [word for word in _WORDS if stars and word in script.unbound_names]
    found: dict[str, int] = {}
    for name in script.nodes(cst.Name):
        if name in bound or not (name in ambiguous or name.value in _WORDS) or not script.is_use(name):
            continue
        node = script.whole_name(name)
        words = dotted(node).partition(".")[2]
        is_unknown = name in ambiguous or name.value in free
        is_old = words.startswith("contrib.") or (is_unknown and standing(words) is Standing.OLD)
        if is_old and not is_checked_for(script, node):
            found.setdefault(dotted(node), script.line(node))
    if found:
        listed = ", ".join(f"{name} in line {line}" for name, line in found.items())
        yield Finding(RULE, min(found.values()), Level.FAILS, _MESSAGE, f"The names are {listed}.")
