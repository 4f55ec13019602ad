"""R6: TensorFlow's own loss scaling, which TensorFlow 2 still has."""

from collections.abc import Iterator

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Result

RULE = "R6"
_MODULES = ("tensorflow.train.experimental", "tensorflow.mixed_precision.experimental", "tensorflow.mixed_precision")
_REWRITES = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
_NAMES = ("MixedPrecisionLossScaleOptimizer", "DynamicLossScale", "FixedLossScale", "LossScale", *_REWRITES)


def report(script: Script) -> Iterator[Result]:
    """Note the names that are kept, once for the script."""
    found = {use.name.rpartition(".")[2]: use.node for use in reversed(script.uses) if _is_ours(use.name)}
    if found:
        line = min(script.line(node) for node in found.values())
        message = _KEPT + (_CASTS if any(name in _REWRITES for name in found) else "")
        yield Finding(RULE, line, Level.NOTE, message, f"The script uses {', '.join(reversed(found))}.")


def _is_ours(name: str) -> bool:
    module, _, word = name.rpartition(".")
    return module in _MODULES and word in _NAMES


_KEPT = (
    "TensorFlow's own loss scaling is kept as it is: TensorFlow 2 has it in tensorflow.compat.v1. To see what the loss "
    'scale does, write tfmp.LossScaleOptimizer(optimizer, "dynamic") in its place, or with '
    "tfmp.FixedLossScaleManager(scale) for a fixed scale."
)
_CASTS = " The graph rewrite also casts operations to float16, on a GPU only; tfmp.autocast does so on CPUs too."
