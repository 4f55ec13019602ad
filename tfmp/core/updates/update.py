"""Unscales gradients and applies them by an optimizer of Keras, in a program compiled by XLA where that saves time."""

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic, reductions
from tfmp.core.gradients.origins import Change
from tfmp.core.tracing import ops_are_watched, within_xla
from tfmp.core.updates.conditions import (
    can_be_compiled,
    has_no_conditional,
    of_tensorflow,
    parts_with_code,
    view_of,
    worth_compiling,
)
from tfmp.core.updates.fingerprint import Fingerprint
from tfmp.core.updates.own_code import OwnCode
from tfmp.core.updates.programs import KeptPrograms, run_compiled
from tfmp.core.updates.replicas import can_be_compiled_on_replicas
from tfmp.types import Gradient, Gradients

_logger = logging.getLogger("tfmp")

#: Whether to compile an update: True, False, or "auto", which compiles where that saves time.
JitCompile: TypeAlias = bool | str
# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any


class OptimizerUpdate:
    """Unscales gradients and applies them, by an optimizer of Keras 2 or Keras 3 that is built.

        plain       optimizer.apply(grads / scale)
        compiled    the same as one XLA program

    With `jit_compile="auto"` the update is compiled if the variables are large and if the optimizer, its schedule and
    the constraints of the variables are all Keras' own: a user's code may do what XLA cannot compile, such as printing.
    With True it is compiled with a user's code too, in a `tf.function`. In eager mode the compiled program is kept and
    run again while no setting changes; because a user's code may depend on anything, only Keras' own is compiled there.
    A method that a user puts in the place of one of Keras', on the optimizer or on its class, is a user's code.
    The update is never compiled

    * where `can_be_compiled` returns False;
    * while `tf.debugging.enable_check_numerics` or `tf.debugging.experimental.enable_dump_debug_info` is on, because
      XLA does not have the ops that they add. A warning says so once.

    If the update is compiled, or XLA compiles the whole step, this class clips by the global norm in the optimizer's
    place. The check of the gradients has summed their squares already; within the optimizer XLA would sum them again,
    and slowly, on one core.

    Args:
        optimizer: The optimizer, to which this object refers weakly.
        jit_compile: Whether to compile: True, False or "auto".
    """

    def __init__(self, optimizer: _Optimizer, jit_compile: JitCompile) -> None:
        self._reference = weakref.ref(optimizer)
        self._jit_compile = jit_compile
        self._told_of_debugging = False
        self._last_asked: tuple[list[int], bool] = ([], False)
        self._own_code = OwnCode()
        self._own_optimizer = OwnCode()
        #: The programs that run in eager mode.
        self.programs = KeptPrograms()

    @property
    def optimizer(self) -> _Optimizer:
        """The optimizer."""
        return self._reference()

    @property
    def is_of_own_code(self) -> bool:
        """Whether the optimizer is of a class of Keras, and none of its methods was replaced."""
        return self._own_optimizer.runs_alone([self.optimizer])

    @property
    def code_version(self) -> int:
        """A number that changes whenever a method of the optimizer's class, or of its schedule's, is replaced."""
        return self._own_code.version

    def measure(self, grads: Gradients, variables: Sequence[_Variable], loss_scale: tf.Tensor) -> list[tf.Tensor]:
        """Return the tensors that the update needs for clipping by the global norm.

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

    def compiles(self, variables: Sequence[_Variable]) -> bool:
        """Return whether the update of these variables is compiled.

        Args:
            variables: The variables.
        """
        return self._is_to_be_compiled(variables) and not self._is_debugged()

    def compiles_on_replicas(self, grads: Gradients, variables: Sequence[_Variable]) -> bool:
        """Return whether each replica updates these variables by a program of its own; only for Keras 3.

        Args:
            grads: The gradients of one replica.
            variables: The variables.
        """
        if not self._jit_compile or not can_be_compiled_on_replicas(self.optimizer, grads):
            return False
        is_large = self._jit_compile is True or self._is_worth_compiling(variables)
        scales = self.optimizer.loss_scale_factor is not None
        return is_large and not scales and self._suits_xla(variables) and not self._is_debugged()

    def _clips(self, variables: Sequence[_Variable]) -> bool:
        """Return whether the gradients are clipped here: the optimizer clips by global norm, and XLA compiles it."""
        in_xla = self.compiles(variables) or within_xla()
        # A user's code may change the gradients before they are clipped.
        return in_xla and _clips_by_global_norm(self.optimizer) and self._is_by_keras_alone(variables)

    def _is_to_be_compiled(self, variables: Sequence[_Variable]) -> bool:
        if not self._jit_compile or not can_be_compiled():
            return False
        if self._jit_compile == "auto":
            return self._is_worth_compiling(variables) and self._suits_xla(variables)
        return not tf.executing_eagerly() or self._is_by_keras_alone(variables)

    def _suits_xla(self, variables: Sequence[_Variable]) -> bool:
        # A user's code may do what XLA cannot compile, such as printing.
        return has_no_conditional(self.optimizer) and self._is_by_keras_alone(variables)

    def _is_by_keras_alone(self, variables: Sequence[_Variable]) -> bool:
        return self._own_code.runs_alone(parts_with_code(self.optimizer, variables))

    def _is_worth_compiling(self, variables: Sequence[_Variable]) -> bool:
        # In eager mode each step asks, about the same variables.
        asked, answer = self._last_asked
        identities = list(map(id, variables))
        if asked != identities:
            answer = worth_compiling(list(map(of_tensorflow, variables)))
            self._last_asked = identities, answer
        return answer

    def _is_debugged(self) -> bool:
        watched = ops_are_watched()
        if watched and not self._told_of_debugging:
            self._told_of_debugging = True
            _logger.warning(
                "the update of the variables is not compiled, as with jit_compile=False: check numerics or the dump of "
                "debug info (tf.debugging) is on, and XLA does not have the ops that these add."
            )
        return watched


def validated_jit_compile(value: object) -> JitCompile:
    """Return a setting of this name, or raise an error if it is none.

    Args:
        value: The value that the user passed.

    Raises:
        ValueError: The value is not True, False or "auto".
    """
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError(f'jit_compile must be True, False or "auto", got {value!r}.')


class Updates:
    """The updates of optimizers, one for each; those of optimizers that are gone are forgotten.

    Copies of this object are empty.

    Args:
        jit_compile: Whether to compile updates: True, False or "auto".

    Examples:
        >>> import keras
        >>> updates, optimizer = Updates("auto"), keras.optimizers.SGD(0.5)
        >>> updates.of(optimizer) is updates.of(optimizer)
        True
    """

    def __init__(self, jit_compile: JitCompile) -> None:
        self._jit_compile = jit_compile
        self._each: weakref.WeakKeyDictionary[_Optimizer, OptimizerUpdate] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["Updates"], tuple[JitCompile]]:
        return Updates, (self._jit_compile,)

    def of(self, optimizer: _Optimizer) -> OptimizerUpdate:
        """Return the update of an optimizer.

        Args:
            optimizer: An optimizer of Keras 2 or Keras 3.
        """
        if optimizer not in self._each:
            self._each[optimizer] = OptimizerUpdate(optimizer, self._jit_compile)
        return self._each[optimizer]


class Part(NamedTuple):
    """The part of one optimizer in a step.

    Attributes:
        update: The update of the optimizer.
        grads: The gradients of the scaled loss.
        variables: The variables.
        measures: The tensors that `OptimizerUpdate.measure` returned for these gradients.
        changes: For each gradient a function that is called with the unscaled values and returns those to apply, or
            None. In eager mode all are None: a program that is kept could not take the tensors that they use.
        options: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
        method: The method of the optimizer that applies them: "apply_gradients", or "apply" of Keras 3.
    """

    update: OptimizerUpdate
    grads: Gradients
    variables: Sequence[_Variable]
    measures: Sequence[tf.Tensor]
    changes: Sequence[Change | None]
    options: Mapping[str, Any]
    method: str = "apply_gradients"


def apply_together(parts: Sequence[Part], loss_scale: tf.Tensor) -> None:
    """Divide the gradients of several optimizers by the loss scale and apply them, in one program where possible.

    Args:
        parts: The part of each optimizer.
        loss_scale: The loss scale.
    """
    groups: dict[str, list[Part]] = {}
    for part in parts:
        # A program runs on one device.
        device = of_tensorflow(part.variables[0]).device if part.update.compiles(part.variables) else _PLAIN
        groups.setdefault(device, []).append(part)
    for device, group in groups.items():
        shares = [_share(part) for part in group]
        grads = [grad for part in group for grad in part.grads]
        norms = [norm for part in group for norm in _norms(part, loss_scale)]
        _apply(shares, grads, [loss_scale, *norms], compiles=device != _PLAIN)


#: In the place of a device: the updates that are not compiled.
_PLAIN = ""


class _Share(NamedTuple):
    """The share of one optimizer in a program: a part without its gradients, which the program takes as arguments."""

    update: OptimizerUpdate
    variables: Sequence[_Variable]
    changes: Sequence[Change | None]
    num_norms: int
    options: Mapping[str, Any]
    method: str

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norms: Sequence[tf.Tensor]) -> None:
        optimizer = self.update.optimizer
        true_grads: Gradients = arithmetic.unscale(grads, loss_scale)
        if any(self.changes):
            true_grads = list(map(_changed, true_grads, self.changes))
        if not norms:
            self._apply(optimizer, true_grads)
            return
        (norm,) = norms
        with view_of(optimizer, global_clipnorm=None, clipvalue=None) as view:
            self._apply(view, _clipped(true_grads, optimizer, norm))

    def _apply(self, optimizer: _Optimizer, grads: Gradients) -> None:
        pairs = list(zip(grads, self.variables, strict=True))
        if self.method == "apply":
            _in_one_replica(lambda: optimizer.apply(list(grads), self.variables))
        elif hasattr(optimizer, "apply"):
            _in_one_replica(lambda: optimizer.apply_gradients(pairs))
        else:
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True, **self.options)

    def settings(self) -> object:
        """Return all that the program depends on, apart from the values of variables."""
        of_variables = [
            [variable, *(getattr(variable, name, None) for name in _SETTINGS)] for variable in self.variables
        ]
        return [
            self.update.optimizer,
            self.update.code_version,
            of_variables,
            self.num_norms,
            self.options,
            self.method,
        ]


def _share(part: Part) -> _Share:
    return _Share(part.update, part.variables, part.changes, len(part.measures), part.options, part.method)


#: The attributes of a model's variable that change what an optimizer does with it.
_SETTINGS = ("trainable", "constraint", "overwrite_with_gradient")


def _apply(shares: Sequence[_Share], grads: Gradients, tensors: Sequence[tf.Tensor], *, compiles: bool) -> None:
    def update(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        loss_scale, *norms = tensors
        own_grads, own_norms = iter(grads), iter(norms)
        for share in shares:
            taken = list(itertools.islice(own_grads, len(share.variables)))
            share.run(taken, loss_scale, list(itertools.islice(own_norms, share.num_norms)))

    if not compiles:
        update(grads, tensors)
    elif tf.executing_eagerly():
        programs = shares[0].update.programs
        programs.run(update, lambda: Fingerprint(share.settings() for share in shares), grads, tensors)
    else:
        run_compiled(update, grads, tensors)


def _in_one_replica(apply: Callable[[], None]) -> None:
    """Call a function that applies gradients, such that Keras 3 does not sum them over replicas if there is only one.

    The sum would change nothing, but TensorFlow (2.15 to 2.21) would keep its graph, and the values of all variables
    that the graph uses, until the process ends.
    """
    context = None if tf.distribute.has_strategy() else tf.distribute.get_replica_context()
    if context is None:
        apply()
    else:
        context.merge_call(lambda _: apply())


def _norms(part: Part, loss_scale: tf.Tensor) -> list[tf.Tensor]:
    if within_xla():
        return list(part.measures)
    return [_true_norm(part.grads, squares, loss_scale) for squares in part.measures]


def _changed(grad: Gradient, change: Change | None) -> Gradient:
    return grad if change is None else arithmetic.map_values(change, grad)


def _clipped(grads: Gradients, optimizer: _Optimizer, norm: tf.Tensor) -> Gradients:
    factor = tf.minimum(optimizer.global_clipnorm / norm, 1.0)
    # The multiplication makes sparse gradients dense, as Keras' own clipping does.
    return [None if grad is None else grad * tf.cast(factor, grad.dtype) for grad in grads]


def _clips_by_global_norm(optimizer: _Optimizer) -> bool:
    """Return whether the optimizer clips the gradients of every call by their global norm."""
    # If both settings are there, Keras uses clipnorm only. An optimizer that accumulates gradients clips their sums, at
    # the end of each window.
    clips = _is_positive(optimizer.global_clipnorm) and not _is_positive(optimizer.clipnorm)
    return clips and not getattr(optimizer, "gradient_accumulation_steps", None)


def _is_positive(norm: float | None) -> bool:
    return norm is not None and norm > 0


def _true_norm(grads: Gradients, squares: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Return the global norm of scaled gradients after unscaling."""
    return tf.cast(reductions.global_norm(grads, squares) / tf.cast(loss_scale, tf.float64), tf.float32)
