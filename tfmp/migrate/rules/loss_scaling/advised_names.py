"""R8b, R15: names of other packages that have no successor, with what to write in their place."""

import re
from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import literal_text
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Result

_PREFIX = "TF_ENABLE_AUTO_MIXED_PRECISION"
_GRAPH_REWRITE = "tf.compat.v1.train.experimental.enable_mixed_precision_graph_rewrite(opt)"
#: For the names that a pattern matches in full: the rule, the level and the message.
_ADVICE = {
    "MixedPrecisionOptimizerWrapper": (
        "R8b",
        Level.FAILS,
        "MixedPrecisionOptimizerWrapper of OpenSeq2Seq keeps float32 copies of float16 variables, and scales the loss. "
        "Replace it by hand: make the variables float32 by custom_getter=tfmp.float32_variable_storage_getter, which "
        "casts them for the layers, and wrap the optimizer: `opt = tfmp.LossScaleOptimizer(opt, manager)`.",
    ),
    f"{_PREFIX}_LOSS_SCALING": (
        "R15",
        Level.NOTE,
        f"Only NVIDIA's containers read {_PREFIX}_LOSS_SCALING. Elsewhere the loss is not scaled by it: write "
        f"`opt = tfmp.LossScaleOptimizer(opt, manager)`, or `opt = {_GRAPH_REWRITE}`, which scales by itself.",
    ),
    rf"{_PREFIX}\w*": (
        "R15",
        Level.NOTE,
        f"Only NVIDIA's containers read {_PREFIX} and the variables whose names start with it. Elsewhere training runs "
        f"in float32: to turn mixed precision on, write `opt = {_GRAPH_REWRITE}`, or in Keras "
        "`tf.keras.mixed_precision.set_global_policy('mixed_float16')`.",
    ),
}


def report(script: Script) -> Iterator[Result]:
    """Report each message once, at the first name that it is about."""
    told = set()
    for node, word in _words(script) if re.search("|".join(_ADVICE), script.text) else ():
        row = next((row for pattern, row in _ADVICE.items() if re.fullmatch(pattern, word)), None)
        if row is not None and row not in told:
            told.add(row)
            yield Finding(row[0], script.line(node), row[1], row[2])


def _words(script: Script) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield the classes, the called functions, the keyword arguments, and the strings that no call merely reads."""
    yield from ((node, node.name.value) for node in script.nodes(cst.ClassDef))
    for call in script.nodes(cst.Call):
        yield call, script.last_word(call)
        yield from ((arg, arg.keyword.value) for arg in call.args if arg.keyword is not None)
    for text in script.nodes(cst.SimpleString):
        above = next((each for each in script.ancestors(text) if isinstance(each, cst.Call)), None)
        if above is None or script.last_word(above) not in ("get", "getenv"):
            yield text, literal_text(text)
