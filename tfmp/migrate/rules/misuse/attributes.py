"""Finds attributes that a script reads from a wrapper although only the wrapped optimizer has them."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.edits.results import Level

# Attributes and constructor arguments of the optimizers in tf.train.
_OF_INNER = frozenset(
    (
        *("_lr", "_lr_t", "_learning_rate", "_learning_rate_tensor", "learning_rate", "lr"),
        *("_beta1", "_beta2", "_beta1_t", "_beta2_t", "_epsilon", "_epsilon_t", "_momentum", "_momentum_tensor"),
        *("_decay", "_decay_tensor", "_rho", "_use_nesterov", "_get_beta_accumulators", "_optimizer"),
        *("beta1", "beta2", "beta_1", "beta_2", "epsilon", "momentum", "weight_decay_rate"),
    )
)


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Report attributes of the inner optimizer that the script reads from the wrapper."""
    optimizers = script.cached(WrappedOptimizers)
    # An attribute that the script sets on the wrapper does exist there.
    set_here = {dotted(target.target) for target in script.nodes(cst.AssignTarget)}
    for node in script.nodes(cst.Attribute) if optimizers.constructions else ():
        if node.attr.value not in _OF_INNER or not dotted(node.value) or dotted(node) in set_here:
            continue
        wrapping = optimizers.wrapping(node.value)
        # NPULossScaleOptimizer forwards unknown attributes to its inner optimizer; a Keras wrapper has most of them.
        if wrapping is None or optimizers.is_of_npu(wrapping.call) or _is_of_keras(script, wrapping.call):
            continue
        around = optimizers.distributed_call(node.value)
        # Horovod's DistributedOptimizer keeps its inner optimizer as _optimizer.
        if around is not None and (node.attr.value == "_optimizer" or "npu" in script.code(around.func).lower()):
            continue
        message = _MESSAGE if around is None else _OF_HOROVOD
        name, said = script.code(node.value), optimizers.description(node.value, wrapping)
        yield node, Level.FAILS, message.format(optimizer=said, name=name, attribute=node.attr.value)


def _is_of_keras(script: Script, construction: cst.Call) -> bool:
    """Tell whether a wrapper may wrap a Keras optimizer."""
    return any(".keras." in f".{use.name}." or use.name.startswith("tf_keras") for use in script.uses) and (
        script.name_of(construction.func).startswith("tfmp.")
    )


_OF_HOROVOD = (
    "{optimizer} is Horovod's optimizer around a loss-scale wrapper and has no {attribute}: write "
    "{name}._optimizer._opt.{attribute}, of the wrapped optimizer."
)
_MESSAGE = (
    "{optimizer} is a wrapper and has no {attribute}: write {name}._opt.{attribute}, of the wrapped optimizer. The "
    "wrapper has _opt and _loss_scale_manager, as tf.contrib's had."
)
