"""R12: uses of loss scaling that train wrongly, or that tfmp rejects."""

from collections.abc import Iterator

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Result
from tfmp.migrate.rules.misuse import bypassed, clipped, doubled, wrapper_order

RULE = "R12"
_MISUSES = (bypassed, doubled, wrapper_order, clipped)
_WORDS = ("LossScale", "enable_mixed_precision_graph_rewrite")


def report(script: Script) -> Iterator[Result]:
    """Report every misuse in a script."""
    if any(word in script.text for word in _WORDS):
        for misuse in _MISUSES:
            for node, level, message, detail in misuse.find(script):
                yield Finding(RULE, script.line(node), level, message, detail)
