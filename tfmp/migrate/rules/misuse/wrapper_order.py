"""Finds distributed optimizers outside a wrapper: they send gradients that are already unscaled."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.edits.results import Level


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Report distributed optimizers around a wrapper, and unscaled gradients that are sent as float16."""
    optimizers, flow = script.cached(WrappedOptimizers), script.cached(DataFlow)
    for call in script.nodes(cst.Call) if optimizers.constructions else ():
        inner = optimizers.distributed_optimizer(call)
        wrapping = optimizers.wrapping(inner)
        if wrapping is not None and inner is not None:
            around, said = script.code(call.func), f"the wrapped {optimizers.description(inner, wrapping)}"
            said = said.replace("the wrapped the ", "the wrapped ")
            if around.split(".")[-1] != "DistributedOptimizer":
                yield call, Level.WRONG, _NPU.format(around=around, optimizer=said)
            elif _is_float16(script, call):
                yield call, Level.WRONG, _FLOAT16_OUTSIDE.format(around=around, optimizer=said)
            elif not _agrees(script, wrapping.call):
                yield call, Level.NOTE, _OUTSIDE.format(around=around, optimizer=said)
        elif script.last_word(call) == "allreduce" and _is_float16(script, call) and call.args:
            behind = flow.calls_behind(call.args[0].value, optimizers.computes_gradients)
            if any(optimizers.computed_by_wrapper(each) is not None for each in behind):
                yield call, Level.WRONG, _FLOAT16.format(function=script.code(call.func))


def _agrees(script: Script, construction: cst.Call) -> bool:
    """Tell whether a wrapper combines the finite check of all processes (`is_distributed=True`)."""
    given = argument(construction, 2, "is_distributed")
    return given is not None and script.code(given) == "True"


def _is_float16(script: Script, call: cst.Call) -> bool:
    compression = argument(call, -1, "compression")
    if compression is None:
        return False
    behind = script.cached(DataFlow).nodes_behind(compression, lambda each: True)
    return any(isinstance(node, cst.Attribute) and node.attr.value == "fp16" for node in behind)


_ORDER = "LossScaleOptimizer(hvd.DistributedOptimizer(optimizer), manager, is_distributed=True)"
_NPU = (
    "{around} around {optimizer} sends gradients that are unscaled already, so small ones are lost if they "
    f"travel in float16. Write the wrapper outermost, and Horovod where the bridge summed: {_ORDER}."
)
_FLOAT16_OUTSIDE = (
    "{around} is around {optimizer}, and sends gradients as float16 after they were unscaled: the small "
    f"ones that scaling saved are lost. Write the wrapper outermost: {_ORDER}, with the compression inside."
)
_OUTSIDE = (
    "{around} is around {optimizer}, so gradients travel unscaled. That works, with is_distributed=True in "
    f"the wrapper; before you send them in float16 put the wrapper outermost: {_ORDER}."
)
_FLOAT16 = (
    "{function} sends gradients as float16 after compute_gradients unscaled them: the small ones that scaling saved "
    "are lost. Leave the compression out here; tfmp's wrapper with is_distributed=True, aggregation_dtype='float16' "
    "sends them while they are scaled."
)
