"""Checks the optimizers, and the pairs of gradients and variables, that users pass to `step`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.adapter import is_overwritten
from tfmp.core.distribute.horovod_detection import is_horovods
from tfmp.grad_scaler.scaled_gradients import ScaledGradientsOptimizer
from tfmp.types import Gradient, GradsAndVars


def validated_pairs(optimizer: Any, grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Any]]:  # noqa: ANN401
    """Return pairs of gradients and variables as a list, or raise an error if a step with them is not possible."""
    validate_optimizer(optimizer)
    pairs = lists.pairs(grads_and_vars)
    if not pairs:
        raise ValueError("there are no gradients to step with: pass pairs of a gradient and its variable.")
    lists.refuse_all_none(grad for grad, _ in pairs)
    if any(is_overwritten(variable) for _, variable in pairs):
        raise NotImplementedError(
            'the "gradient" of a variable is its next value (float8 scales), which tfmp.GradScaler would unscale: '
            "train it with tfmp.LossScaleOptimizer."
        )
    return pairs


def validate_optimizer(optimizer: Any) -> None:  # noqa: ANN401
    """Raise an error if `GradScaler` cannot step with what the user passed as the optimizer."""
    settings.refuse_class("optimizer", optimizer)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, ScaledGradientsOptimizer) and not hasattr(optimizer, "apply_gradients"):
        raise TypeError(
            f"optimizer must be an optimizer of Keras or TF1, with apply_gradients, got {optimizer!r} of type {kind}."
        )
    if "LossScaleOptimizer" in kind:
        raise ValueError(f"the optimizer is a {kind}, which scales the loss itself: step with the optimizer inside it.")
    if isinstance(optimizer, tf.compat.v1.train.SyncReplicasOptimizer):
        raise TypeError(
            "the optimizer is a SyncReplicasOptimizer, whose step cannot stand in a conditional: write "
            "SyncReplicasOptimizer(tfmp.LossScaleOptimizer(opt, manager), ...), without a tfmp.GradScaler."
        )
    if is_horovods(optimizer):
        raise ValueError(
            "the optimizer is one of Horovod's, which averages gradients itself: step with the optimizer inside it, "
            "and pass is_distributed=True to tfmp.GradScaler."
        )
    with tf.init_scope():
        in_graph = not tf.executing_eagerly()
    # The optimizers in Keras' `optimizers.legacy` have no `build`. They can step in a TF1 graph.
    if in_graph and hasattr(optimizer, "build") and hasattr(optimizer, "iterations"):
        raise NotImplementedError(
            f"the optimizer is Keras' {kind}, which has no op that a session could run: in a TF1 graph pass a "
            "tf.compat.v1.train.Optimizer, or train eagerly or in a tf.function."
        )


def validated_steps(steps: Iterable[tuple[Any, GradsAndVars]]) -> list[tuple[Any, GradsAndVars]]:
    """Return pairs of an optimizer and its `grads_and_vars` as a list, or raise an error if they are not such pairs."""
    what, advice = "pairs of an optimizer and its grads_and_vars", "pass [(optimizer, zip(grads, variables)), ...]"
    listed = lists.items("steps", steps, what, advice)
    if not listed:
        raise ValueError(f"there is no optimizer to step: pass {what}.")
    for pair in listed:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"steps must be {what}, and it holds {pair!r} of type {type(pair).__name__}: {advice}.")
    return listed


def validate_kwargs(optimizers: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error if one of the optimizers that step together does not take the keyword arguments of each.

    Otherwise some optimizers would step before the call of that one fails.
    """
    given = ", ".join(kwargs)
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if kwargs and isinstance(optimizer, ScaledGradientsOptimizer):
            raise TypeError(f"{kind}.apply_scaled_gradients takes no {given}: leave it out.")
        if kwargs and len(optimizers) > 1 and not isinstance(optimizer, tf.compat.v1.train.Optimizer):
            raise TypeError(
                f"{given} would be passed to each optimizer, and {kind} is not TF1's: leave it out, or step each "
                "optimizer by itself."
            )


def refuse_in_graph(verb: str) -> None:
    """Raise an error if a method that needs the values of variables is called in a graph, where they have none yet."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{verb} was called in a graph, where nothing has a value yet: call it eagerly, outside of any "
            "tf.function. In a TF1 graph the state is in variables, which tf.compat.v1.train.Saver saves."
        )
