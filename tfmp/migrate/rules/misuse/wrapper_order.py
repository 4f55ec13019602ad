"""Finds distributed optimizers outside a wrapper: they send gradients that are already unscaled."""

from collections.abc import Iterator
from itertools import islice

import libcst as cst

from tfmp.migrate.analysis.expressions import argument
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.edits.results import Level


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Report distributed optimizers around a wrapper, and unscaled gradients that are sent as float16."""
    optimizers = script.cached(WrappedOptimizers)
    for call in script.nodes(cst.Call) if optimizers.constructions else ():
        inner = optimizers.distributed_optimizer(call)
        wrapping = optimizers.wrapping(inner)
        if wrapping is not None and inner is not None:
            told = ((each, found) for each in wrapping.calls if (found := _outside(script, call, each)) is not None)
            for wrapper, found in islice(told, 1):
                optimizer = optimizers.description(inner, wrapper, wrapping.certain)
                yield call, *found, f"{script.code(call.func)} receives {optimizer}."
        elif script.last_word(call) == "allreduce" and _is_float16(script, call) and call.args:
            computed = optimizers.computations_behind(call.args[0].value)
            if any(optimizers.computed_by_wrapper(each) is not None for each in computed):
                yield call, Level.WRONG, _FLOAT16, ""


def _outside(script: Script, call: cst.Call, wrapper: cst.Call) -> tuple[Level, str] | None:
    """Return the level and the message for a distributed optimizer around a wrapper; None if it is correct."""
    if _is_float16(script, call):
        return Level.WRONG, _FLOAT16_OUTSIDE
    # TensorFlow's wrapper looks for overflow in the summed gradients, which are the same in all processes.
    if script.cached(WrappedOptimizers).is_tensorflows(wrapper):
        return None
    agreed = argument(wrapper, 2, "is_distributed")
    return None if agreed is not None and script.code(agreed) == "True" else (Level.NOTE, _OUTSIDE)


def _is_float16(script: Script, call: cst.Call) -> bool:
    compression = argument(call, -1, "compression")
    if compression is None:
        return False
    behind = script.cached(WrappedOptimizers).flow.behind([compression], lambda each: True)
    return any(isinstance(node, cst.Attribute) and node.attr.value == "fp16" for node in behind)


_ORDER = "tfmp.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer), manager, is_distributed=True)"
_FLOAT16_OUTSIDE = (
    "A distributed optimizer is around the loss-scale optimizer, and sends gradients in float16 after they were "
    "unscaled: the small ones that loss scaling kept become zero. Put the loss-scale optimizer outermost, and keep the "
    f"compression inside: {_ORDER}. With TensorFlow's wrapper, write it around hvd.DistributedOptimizer too."
)
_OUTSIDE = (
    "A distributed optimizer is around the loss-scale optimizer, so gradients are sent unscaled. That works if the "
    "loss-scale optimizer has is_distributed=True, by which all processes skip the same steps. Before you send "
    f"gradients in float16, put the loss-scale optimizer outermost: {_ORDER}."
)
_FLOAT16 = (
    "This allreduce sends gradients in float16 after compute_gradients unscaled them: the small ones that loss scaling "
    "kept become zero. Leave the compression out here. To send them in float16 while they are scaled, construct the "
    "wrapper with is_distributed=True and aggregation_dtype='float16', and leave this allreduce out."
)
