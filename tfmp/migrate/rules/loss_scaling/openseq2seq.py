"""R8b: the optimizer wrapper of OpenSeq2Seq, which must be replaced by hand."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R8b"
_NAME = "MixedPrecisionOptimizerWrapper"
_MESSAGE = (
    f"{_NAME} trains float16 variables with float32 master copies and a capped scale: a person must replace it. Make "
    "float32 variables by custom_getter=tfmp.float32_variable_storage_getter, which casts them for the layers, and "
    "wrap the optimizer by tfmp.LossScaleOptimizer(optimizer, manager), where the manager has the cap as "
    "max_loss_scale."
)


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report each definition of the wrapper and each call that puts it around an optimizer."""
    del options
    if _NAME not in script.text:
        return
    bound = {name for node in script.nodes(cst.ImportFrom) for name in _bound_by(node)}
    for node in script.nodes(cst.ClassDef):
        if node.name.value == _NAME:
            bound.add(_NAME)
            yield Finding(RULE, script.line(node.name), Level.FAILS, _MESSAGE)
    for call in script.nodes(cst.Call):
        of_module = script.name_of(call.func)
        if (isinstance(call.func, cst.Name) and call.func.value in bound) or of_module.endswith(f".{_NAME}"):
            yield Finding(RULE, script.line(call), Level.FAILS, _MESSAGE)


def _bound_by(node: cst.ImportFrom) -> Iterator[str]:
    """Yield the names that an import binds to the wrapper. Imports inside OpenSeq2Seq are relative; they count too."""
    for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
        if isinstance(alias.name, cst.Name) and alias.name.value == _NAME:
            asname = alias.asname.name if alias.asname is not None else alias.name
            yield asname.value if isinstance(asname, cst.Name) else _NAME
