"""R12: uses of loss scaling that train wrongly, or that tfmp does not take."""

from collections.abc import Iterator

from tfmp.migrate.reading.script import Script
from tfmp.migrate.results import Finding, Options, Result
from tfmp.migrate.rules.misuse import attributes, bypassed, clipped, doubled, inner_steps, outside, subclasses

RULE = "R12"
_MISUSES = (subclasses, bypassed, inner_steps, doubled, outside, clipped, attributes)


def report(script: Script, options: Options) -> Iterator[Result]:
    """Tell of each misuse."""
    del options
    if "LossScale" not in script.text:
        return
    for misuse in _MISUSES:
        for node, level, message in misuse.find(script):
            yield Finding(RULE, script.line(node), level, message)
