"""What a Keras 3 optimizer does to the variables in a step that is applied, compiled where that pays."""

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

#: Whether to compile an update, True or False, or "auto".
JitCompile: TypeAlias = bool | str


class Keras3Update:
    """Unscales gradients, clips and applies them, by a Keras 3 optimizer that is built.

        plain       optimizer.apply(grads / scale)
        compiled    the same as one program

    In a program, and within XLA, clipping by global norm is done for the optimizer: the check knows the norm.

    Compiled is what a `tf.function` traces. With "auto" it is compiled if the variables are large, and if all that
    computes is Keras' own: a user's code may do what XLA cannot, such as printing. With True it is compiled whatever
    computes. It is never compiled for other variables than those that the optimizer was built with, nor where
    `can_be_compiled` says no; nor under `tf.debugging.enable_check_numerics`, whose ops XLA does not have, and which
    is said once.

    Args:
        optimizer: The optimizer.
        variables: Those that it was built with.
        jit_compile: Whether to compile.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], jit_compile: JitCompile
    ) -> None:
        self._optimizer = optimizer
        self._variables = variables
        self._jit_compile = jit_compile
        self._told_of_debugging = False

    def measure(self, grads: Gradients, variables: Sequence[keras.Variable], loss_scale: tf.Tensor) -> list[tf.Tensor]:
        """Return what clipping by the global norm needs to know of scaled gradients, which the check computes too.

        Args:
            grads: The gradients of the scaled loss.
            variables: The variables.
            loss_scale: The loss scale.

        Returns:
            Nothing if the optimizer is to clip by itself, or not at all. Within XLA the norm of the unscaled gradients:
            in the loop that a step is there it would be slow, and out here it costs little in a skipped step. Otherwise
            the sums of squares that `reductions.half_squares` returns.
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
            measures: What `measure` returned of the gradients.
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
        """Tell whether the gradients are clipped here: where XLA would sum the squares in the optimizer on one core."""
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
                "the update of the variables is not compiled, as with jit_compile=False: check numerics is on, or the "
                "dump of debug info (tf.debugging), and XLA does not have the ops that they add."
            )
        return watched

    def _clip_and_apply(self, grads: Gradients, variables: Sequence[keras.Variable], norm: tf.Tensor) -> None:
        factor = tf.minimum(self._optimizer.global_clipnorm / norm, 1.0)
        # This makes sparse gradients dense, as it does in Keras.
        clipped = [None if grad is None else grad * tf.cast(factor, grad.dtype) for grad in grads]
        _without_clipping(self._optimizer).apply(clipped, variables)


def _are_the_same(variables: Sequence[keras.Variable], others: Sequence[keras.Variable]) -> bool:
    return len(variables) == len(others) and all(map(operator.is_, variables, others))


def _of_tensorflow(variable: keras.Variable) -> tf.Variable:
    # Keras also takes TensorFlow's own. Its own are no `keras.Variable` before Keras 3.7.
    return variable if isinstance(variable, tf.Variable) else variable.value


def _suits_xla(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> bool:
    """Tell whether all that computes is Keras' own, and no conditional is in it: within XLA it would copy variables."""
    if hasattr(optimizer, "optimizers"):
        # A MultiOptimizer, which older versions do not have: its own settings tell nothing of those inside it.
        return False
    if optimizer.gradient_accumulation_steps or optimizer.ema_overwrite_frequency:
        return False
    constraints = [getattr(variable, "constraint", None) for variable in variables]
    # Public is only what the learning rate is at this step, not what computes it.
    parts = [optimizer, optimizer._learning_rate, *(constraint for constraint in constraints if constraint is not None)]
    return all(type(part).__module__.startswith("keras.") for part in parts)


def _clips_by_global_norm(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether it is by their global norm that the optimizer clips the gradients that it is given."""
    # Keras looks at clipnorm first, and clips sums of gradients when they are complete.
    clips = _is_positive(optimizer.global_clipnorm) and not _is_positive(optimizer.clipnorm)
    return clips and not optimizer.gradient_accumulation_steps


def _is_positive(norm: float | None) -> bool:
    return norm is not None and norm > 0


def _true_norm(grads: Gradients, squares: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Return the global norm of scaled gradients after unscaling."""
    return tf.cast(reductions.global_norm(grads, squares) / tf.cast(loss_scale, tf.float64), tf.float32)


def _without_clipping(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return an optimizer of the same variables, for gradients that are clipped already.

    XLA would sum their squares on one core.
    """
    # Not copy.copy, which serializes optimizers.
    view = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer), global_clipnorm=None, clipvalue=None)
    return view
