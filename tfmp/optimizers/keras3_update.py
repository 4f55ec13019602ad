"""Applies gradients by a Keras 3 optimizer, in a program compiled by XLA where that saves time."""

import logging
import operator
from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tfmp.core.gradients import arithmetic, reductions
from tfmp.core.tracing import ops_are_watched, within_xla
from tfmp.optimizers.keras3_compilation import can_be_compiled, run_compiled, worth_compiling
from tfmp.types import Gradients

_logger = logging.getLogger("tfmp")

#: Whether to compile an update: True, False, or "auto", which compiles where that saves time.
JitCompile: TypeAlias = bool | str


class Keras3Update:
    """Unscales gradients and applies them, by a Keras 3 optimizer that is built.

        plain       optimizer.apply(grads / scale)
        compiled    the same as one XLA program

    The update is compiled inside a `tf.function` only. With `jit_compile="auto"` it is compiled if the variables are
    large and if the optimizer, its schedule and the constraints of the variables are all Keras' own: a user's code may
    do what XLA cannot compile, such as printing. With True it is compiled with a user's code too. It is never compiled

    * for other variables than those that the optimizer was built with;
    * where `can_be_compiled` returns False;
    * while `tf.debugging.enable_check_numerics` or `tf.debugging.experimental.enable_dump_debug_info` is on, because
      XLA does not have the ops that they add. A warning says so once.

    If the update is compiled, or XLA compiles the whole step, this class clips by the global norm in the optimizer's
    place. The check of the gradients has summed their squares already; within the optimizer XLA would sum them again,
    and slowly, on one core.

    Args:
        optimizer: The optimizer.
        variables: The variables that the optimizer was built with.
        jit_compile: Whether to compile: True, False or "auto".
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], jit_compile: JitCompile
    ) -> None:
        self._optimizer = optimizer
        self._variables = variables
        self._jit_compile = jit_compile
        self._told_of_debugging = False

    def measure(self, grads: Gradients, variables: Sequence[keras.Variable], loss_scale: tf.Tensor) -> list[tf.Tensor]:
        """Return the tensors that `apply` needs for clipping by the global norm.

        The check of the gradients computes the same sums of squares, so they cost little when computed beside it.

        Args:
            grads: The gradients of the scaled loss.
            variables: The variables.
            loss_scale: The loss scale.

        Returns:
            An empty list if the gradients are not clipped here. Within XLA the norm of the unscaled gradients: there
            the conditional step runs as a loop, in which the norm would be slow, and computing it outside of the loop
            costs little even if the step is skipped. Otherwise the sums of squares from `reductions.half_squares`.
        """
        if not self._clips(variables):
            return []
        squares = reductions.half_squares(grads)
        return [_true_norm(grads, squares, loss_scale)] if within_xla() else [squares]

    def apply(
        self,
        grads: Gradients,
        variables: Sequence[keras.Variable],
        loss_scale: tf.Tensor,
        measures: Sequence[tf.Tensor],
    ) -> None:
        """Divide the gradients by the loss scale and apply them.

        Args:
            grads: The gradients of the scaled loss.
            variables: The variables.
            loss_scale: The loss scale.
            measures: The tensors that `measure` returned for these gradients.
        """
        norms = list(measures) if within_xla() else [_true_norm(grads, squares, loss_scale) for squares in measures]

        def unscale_and_apply(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
            loss_scale, *norms = tensors
            true_grads = arithmetic.unscale(grads, loss_scale)
            if norms:
                self._clip_and_apply(true_grads, variables, *norms)
            else:
                self._optimizer.apply(true_grads, variables)

        if self._compiles(variables):
            run_compiled(unscale_and_apply, grads, [loss_scale, *norms])
        else:
            unscale_and_apply(grads, [loss_scale, *norms])

    def _clips(self, variables: Sequence[keras.Variable]) -> bool:
        """Return whether the gradients are clipped here: the optimizer clips by global norm, and XLA compiles it."""
        return _clips_by_global_norm(self._optimizer) and (self._compiles(variables) or within_xla())

    def _compiles(self, variables: Sequence[keras.Variable]) -> bool:
        return self._is_to_be_compiled(variables) and not self._is_debugged()

    def _is_to_be_compiled(self, variables: Sequence[keras.Variable]) -> bool:
        if not can_be_compiled() or not _are_the_same(variables, self._variables):
            return False
        if self._jit_compile == "auto":
            return worth_compiling(list(map(_of_tensorflow, variables))) and _suits_xla(self._optimizer, variables)
        return bool(self._jit_compile)

    def _is_debugged(self) -> bool:
        watched = ops_are_watched()
        if watched and not self._told_of_debugging:
            self._told_of_debugging = True
            _logger.warning(
                "the update of the variables is not compiled, as with jit_compile=False: check numerics or the dump of "
                "debug info (tf.debugging) is on, and XLA does not have the ops that these add."
            )
        return watched

    def _clip_and_apply(self, grads: Gradients, variables: Sequence[keras.Variable], norm: tf.Tensor) -> None:
        factor = tf.minimum(self._optimizer.global_clipnorm / norm, 1.0)
        # The multiplication makes sparse gradients dense, as Keras' own clipping does.
        clipped = [None if grad is None else grad * tf.cast(factor, grad.dtype) for grad in grads]
        _without_clipping(self._optimizer).apply(clipped, variables)


def _are_the_same(variables: Sequence[keras.Variable], others: Sequence[keras.Variable]) -> bool:
    return len(variables) == len(others) and all(map(operator.is_, variables, others))


def _of_tensorflow(variable: keras.Variable) -> tf.Variable:
    # Keras 3 also trains TensorFlow's variables. The test is not for `keras.Variable`, because variables of Keras are
    # not instances of that class before Keras 3.7.
    return variable if isinstance(variable, tf.Variable) else variable.value


def _suits_xla(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> bool:
    """Return whether only Keras' own code computes the update, and whether it contains no conditional.

    A conditional inside an XLA program would copy the variables.
    """
    if hasattr(optimizer, "optimizers"):
        # This is a MultiOptimizer, a class that older versions of Keras do not have. Its own settings say nothing about
        # the optimizers inside it.
        return False
    if optimizer.gradient_accumulation_steps or optimizer.ema_overwrite_frequency:
        return False
    constraints = [getattr(variable, "constraint", None) for variable in variables]
    # `_learning_rate` is private, but the public property gives only the value at this step, not the schedule.
    parts = [optimizer, optimizer._learning_rate, *(constraint for constraint in constraints if constraint is not None)]
    return all(type(part).__module__.startswith("keras.") for part in parts)


def _clips_by_global_norm(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether the optimizer clips the gradients of every call by their global norm."""
    # If both settings are there, Keras uses clipnorm only. An optimizer that accumulates gradients clips their sums, at
    # the end of each window.
    clips = _is_positive(optimizer.global_clipnorm) and not _is_positive(optimizer.clipnorm)
    return clips and not optimizer.gradient_accumulation_steps


def _is_positive(norm: float | None) -> bool:
    return norm is not None and norm > 0


def _true_norm(grads: Gradients, squares: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Return the global norm of scaled gradients after unscaling."""
    return tf.cast(reductions.global_norm(grads, squares) / tf.cast(loss_scale, tf.float64), tf.float32)


def _without_clipping(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return a view of the optimizer that does not clip and that shares all its variables."""
    # copy.copy would serialize the optimizer and make new variables.
    view = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer), global_clipnorm=None, clipvalue=None)
    return view
