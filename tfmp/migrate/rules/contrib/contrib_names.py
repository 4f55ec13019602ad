"""R2: `tf.contrib.mixed_precision.X` becomes `tfmp.X`."""

from collections.abc import Iterator

from tfmp.migrate.analysis.expressions import without_last_words
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Edit, Finding, Level, NeededImport, Options, Result

RULE = "R2"
MODULE = "tensorflow.contrib.mixed_precision"
#: The public names of tf.contrib.mixed_precision.
NAMES = frozenset(
    ("ExponentialUpdateLossScaleManager", "FixedLossScaleManager", "LossScaleManager", "LossScaleOptimizer")
)


def rewrite(script: Script, options: Options) -> Iterator[Result]:
    """Replace names that are written as `tf.contrib.mixed_precision.X`."""
    del options
    for use in script.uses:
        # A name that was imported from a deeper module is handled by R3 with its import.
        if use.root not in ("tensorflow", "tensorflow.contrib") or not use.name.startswith(f"{MODULE}."):
            continue
        name = use.name[len(MODULE) + 1 :].split(".")[0]
        if name not in NAMES:
            message = f"tf.contrib.mixed_precision had no {name}: its names were {', '.join(sorted(NAMES))}."
            yield Finding(RULE, script.line(use.node), Level.FAILS, message)
            continue
        rest = use.name[len(f"{MODULE}.{name}") :]
        start, end = script.span(without_last_words(use.node, rest.count(".")))
        yield Edit(RULE, start, end, f"tfmp.{name}")
        yield NeededImport(RULE, "tfmp")
