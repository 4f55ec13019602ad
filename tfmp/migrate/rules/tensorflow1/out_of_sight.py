"""R4, second part: modules of TensorFlow that go where the rewriter does not follow them."""

from collections.abc import Iterator

from tfmp.migrate.analysis.hidden_modules import imported_as_text, passed_on, run_as_text
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import TfVersion, detect_version
from tfmp.migrate.edits.results import Finding, Level, Result

RULE = "R4"
_AGAIN = "and run the rewriter again."
_PASSED = (
    "Here a module of TensorFlow is passed on, and the rewriter does not see which names are used through it; they may "
    "be of TensorFlow 1. Write `import tensorflow.compat.v1 as tf` and tf. where they are used, in place of this, "
    f"{_AGAIN}"
)
_AS_TEXT = (
    "TensorFlow is named by a text here, and the rewriter does not see which names are used of it; they may be of "
    f"TensorFlow 1. Write an import statement in its place, such as `import tensorflow.compat.v1 as tf`, {_AGAIN}"
)
_RUN = (
    "The code that this line runs is a text, which the rewriter does not read; its names may be of TensorFlow 1. Write "
    f"it as code, {_AGAIN}"
)


def report(script: Script) -> Iterator[Result]:
    """Report the places, unless other names show that the script is for TensorFlow 2."""
    if script.cached(detect_version).version is TfVersion.V2 or script.tensorflow == 2:
        return
    kinds = ((_PASSED, passed_on), (_AS_TEXT, imported_as_text), (_RUN, run_as_text))
    for message, find in kinds:
        lines: dict[tuple[int, bool], list[str]] = {}
        for hidden in find(script):
            lines.setdefault((script.line(hidden.node), hidden.is_likely), []).append(hidden.shown)
        for (line, is_likely), shown in lines.items():
            level = Level.FAILS if is_likely else Level.NOTE
            yield Finding(RULE, line, level, message, f"It is {', '.join(dict.fromkeys(shown))}.")
