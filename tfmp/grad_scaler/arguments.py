"""Checks the optimizers and the pairs that users step with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import lists
from tfmp.core.adapters import is_overwritten
from tfmp.core.distribute.horovod_detection import is_horovods
from tfmp.grad_scaler.scaled_gradients import ScaledGradientsOptimizer
from tfmp.types import Gradient, GradsAndVars


def validated_pairs(optimizer: Any, grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Any]]:  # noqa: ANN401
    """Return the pairs of gradients and variables that a step is to be taken with, or say why none can be.

    Args:
        optimizer: What the user gave as an optimizer.
        grads_and_vars: What the user gave for it.

    Raises:
        TypeError: It is no optimizer; or these are no pairs.
        ValueError: It scales losses or averages gradients itself; or there is no gradient.
        NotImplementedError: A variable's "gradient" is its next value; or Keras' optimizer cannot step in the graph.
    """
    validate_optimizer(optimizer)
    pairs = lists.pairs(grads_and_vars)
    if all(grad is None for grad, _ in pairs):
        raise ValueError(
            "there are no gradients to step with: pass pairs of a gradient and its variable, of which one gradient at "
            "least is not None."
        )
    if any(is_overwritten(variable) for _, variable in pairs):
        raise NotImplementedError(
            "a variable of float8 scales takes its next value for a gradient, which would be unscaled: train it with "
            "tfmp.LossScaleOptimizer."
        )
    return pairs


def validate_optimizer(optimizer: Any) -> None:  # noqa: ANN401
    """Say why no step can be taken with an optimizer, if none can.

    Args:
        optimizer: What the user gave as an optimizer.

    Raises:
        TypeError: It is none.
        ValueError: It scales losses or averages gradients itself.
        NotImplementedError: It is Keras', and the step is built in a graph of TF1.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, ScaledGradientsOptimizer) and not hasattr(optimizer, "apply_gradients"):
        raise TypeError(
            f"optimizer must be an optimizer of Keras or TF1, with apply_gradients, got {optimizer!r} of type {kind}."
        )
    if "LossScaleOptimizer" in kind:
        raise ValueError(f"the optimizer is a {kind}, which scales the loss itself: step with the optimizer inside it.")
    if is_horovods(optimizer):
        raise ValueError(
            "the optimizer is one of Horovod's, which averages gradients itself: step with the optimizer inside it, "
            "and pass is_distributed=True to tfmp.GradScaler."
        )
    with tf.init_scope():
        in_graph = not tf.executing_eagerly()
    # Those of Keras' `optimizers.legacy` have no `build`, and step in graphs.
    if in_graph and hasattr(optimizer, "build") and hasattr(optimizer, "iterations"):
        raise NotImplementedError(
            f"the optimizer is Keras' {kind}, which has no op that a session could run: in a graph of TF1 pass a "
            "tf.compat.v1.train.Optimizer, or train eagerly or in a tf.function."
        )


def validated_steps(steps: Iterable[tuple[Any, GradsAndVars]]) -> list[tuple[Any, GradsAndVars]]:
    """Return pairs of an optimizer and what it is to step with, or say why these are none.

    Args:
        steps: What the user gave.

    Raises:
        TypeError: These are no pairs.
        ValueError: There are none.
    """
    what, advice = "pairs of an optimizer and its grads_and_vars", "pass [(optimizer, zip(grads, variables)), ...]"
    listed = lists.items("steps", steps, what, advice)
    if not listed:
        raise ValueError(f"there is no optimizer to step: pass {what}.")
    for pair in listed:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"steps must be {what}, and it holds {pair!r} of type {type(pair).__name__}: {advice}.")
    return listed


def validate_kwargs(optimizers: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that not all of the optimizers take: some would step before another fails.

    Args:
        optimizers: The optimizers that step together.
        kwargs: The keyword arguments, which each of them would get.

    Raises:
        TypeError: There are some, and one optimizer does not take them.
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
