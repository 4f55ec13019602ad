"""Unscales gradients and applies them by an optimizer of Keras, as a program of XLA where that saves time."""

import functools
import logging
import math
import re
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.tensorflow_internals import TRACKING_PREFIX, ops_are_watched, unrecorded, within_xla
from tfmp.core.tracing import has_apple_gpu
from tfmp.hosts.keras.internals import learning_rate_or_schedule
from tfmp.hosts.keras.own_code import OWN_PACKAGES, OwnCode, is_from
from tfmp.hosts.keras.shared_programs import num_compiled, run_shared
from tfmp.hosts.keras.views import of_tensorflow, view_of
from tfmp.hosts.keras.which import is_optimizer_of_keras3
from tfmp.types import Done, Gradients

_logger = logging.getLogger("tfmp")

#: The smallest numbers of values, in all variables together and for each update that is compiled, for which compiling
#: saves time. With fewer values the compilation takes longer than what it saves in hundreds of steps.
_MANY = 2**20
_MANY_FOR_EACH = 2**14
#: The number of variables for each update that is compiled from which compiling takes less time than building a graph.
_SHARING = 8
#: The number of settings of an optimizer whose programs eager code keeps.
_MOST_KEPT = 16

#: Whether to compile an update: True, False, or "auto", which compiles where that saves time.
JitCompile: TypeAlias = bool | str
# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any


class KerasProgram:
    """Unscales gradients and applies them by an optimizer that is built; made anew for each step.

        in a function    optimizer.apply(grads / scale) as a program that XLA compiles
        in eager code    the same, which is kept, and run again while no setting changes
        within XLA       a part of the program that XLA compiles anyway

    The step computes the global norm beside its check, and the program clips by it in the optimizer's place: within the
    optimizer XLA would sum the squares again, and slowly, on one core.

    Args:
        compiler: That of the optimizer.
        variables: The variables, in the order of the gradients.
        taken: The indices of the gradients that are passed to the optimizer.
        method: The method of the optimizer that is called: "apply_gradients", or "apply" of Keras 3.
        options: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
    """

    # Eager code keeps this object, which therefore holds no gradients, and the optimizer only weakly.

    def __init__(
        self,
        compiler: "UpdateCompiler",
        variables: Sequence[_Variable],
        taken: Sequence[int],
        method: str,
        options: Mapping[str, Any],
    ) -> None:
        self._compiler = compiler
        self._taken = taken
        self._variables = [variables[index] for index in taken]
        self._method = method
        self._options = options
        # A user's code may change the gradients before they are clipped.
        self.clips = _clips_by_global_norm(compiler.optimizer) and compiler.is_by_keras_alone(self._variables)

    @property
    def is_compiled(self) -> bool:
        """True if XLA compiles the program, alone or with all that is around it."""
        return within_xla() or self._compiler.compiles(self._variables)

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide the gradients by the loss scale, clip and apply them."""
        taken = [grads[index] for index in self._taken]
        tensors = [loss_scale] if norm is None else [loss_scale, norm]
        # A tape, such as one in whose `with` the optimizer is called, would otherwise need a gradient of the program.
        with unrecorded():
            if within_xla():
                self._update(taken, tensors)
            elif tf.executing_eagerly():
                self._run_kept(taken, tensors)
            else:
                self._run_compiled(taken, tensors)
        return tf.no_op()

    def _update(self, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        self._update_some(self._compiler.optimizer, self._variables, grads, tensors)

    def _update_some(
        self, optimizer: _Optimizer, variables: Sequence[_Variable], grads: Gradients, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Update variables; the tensors are the loss scale, and the global norm of all gradients if that is known."""
        loss_scale, *norms = tensors
        grads = arithmetic.unscale(grads, loss_scale)
        if not norms:
            self._apply(optimizer, variables, grads)
            return
        norm = tf.cast(norms[0] / tf.cast(loss_scale, tf.float64), tf.float32)
        factor = tf.minimum(optimizer.global_clipnorm / norm, 1.0)
        # The multiplication makes sparse gradients dense, as Keras' own clipping does.
        clipped = [None if grad is None else grad * tf.cast(factor, grad.dtype) for grad in grads]
        with view_of(optimizer, global_clipnorm=None, clipvalue=None) as view:
            self._apply(view, variables, clipped)

    def _apply(self, optimizer: _Optimizer, variables: Sequence[_Variable], grads: Gradients) -> None:
        pairs = list(zip(grads, variables, strict=True))
        if not is_optimizer_of_keras3(optimizer):
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True, **self._options)
            return
        arguments = (list(grads), variables) if self._method == "apply" else (pairs,)
        apply = functools.partial(getattr(optimizer, self._method), *arguments)
        # Keras 3 sums gradients over the replicas, also if there is one. The sum would change nothing, but TensorFlow
        # (2.15 to 2.21) would keep its graph, and the values of all variables in it, until the process ends.
        context = None if tf.distribute.has_strategy() else tf.distribute.get_replica_context()
        if context is None:
            apply()
        else:
            context.merge_call(lambda _: apply())

    def _run_compiled(self, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        """Update the variables in a `tf.function` by a compiled program, or by several that variables share."""
        optimizer = self._compiler.optimizer
        clips_all = optimizer.global_clipnorm is not None and len(tensors) == 1
        can_be_split = not clips_all and self._compiler.is_by_keras_alone(self._variables)
        if can_be_split and run_shared(self._update_some, optimizer, self._variables, grads, tensors):
            return
        # XLA compiles it again for every new shape.
        _function(self._update, jit_compile=True)([arithmetic.pad_rows(grad) for grad in grads], tensors)

    def _run_kept(self, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        """Update the variables in eager code by the program that was traced with these settings.

        A program contains Python's numbers and flags as they were when it was traced; the values of variables it reads
        anew each time it runs. The first update with settings is not compiled.
        """
        programs, references = self._compiler.programs, list[Callable[[], object]]()
        key = _key(self._settings(len(tensors)), references)
        kept = programs.pop(key, None)
        if kept is None or any(reference() is None for reference in kept.references):
            self._update(grads, tensors)
            # What the optimizer changes in Python would stay as it is when a program runs: Nadam of Keras 2 counts its
            # steps there. Other attributes are notes, which are made once: the next step finds the settings with them.
            if _key(self._settings(len(tensors)), []) != key:
                return
            kept = _Kept(references, None)
        else:
            # The numbers of rows of sparse gradients differ between calls.
            kept = _Kept(kept.references, kept.program or _function(self._run_compiled, reduce_retracing=True))
            kept.program(grads, tensors)
        programs[key] = kept
        while len(programs) > _MOST_KEPT:
            del programs[next(iter(programs))]

    def _settings(self, num_tensors: int) -> list[object]:
        """Return all that the update depends on, apart from its arguments and the values of variables."""
        parts = self._compiler.parts(self._variables)
        own = [[item for item in vars(part).items() if not item[0].startswith(TRACKING_PREFIX)] for part in parts]
        names = ("trainable", "constraint", "overwrite_with_gradient")
        of_variables = [[each, *(getattr(each, name, None) for name in names)] for each in self._variables]
        return [parts, own, of_variables, self._compiler.own_code.version, self._method, self._options, num_tensors]


class _Kept(NamedTuple):
    """What eager code keeps for settings: a program, or None before there is one.

    `references` are to what the key of the settings has by identity: the key means nothing once one of them is gone.
    """

    references: Sequence[Callable[[], object]]
    program: Any


def _key(value: Any, references: list[Callable[[], object]]) -> Hashable:  # noqa: ANN401 - whatever a setting may be
    """Return what is equal for settings that are the same; what may change unseen equals nothing."""
    if value is None or isinstance(value, int | float | complex | str | bytes | np.generic):
        # As text: 1 equals True, 0.0 equals -0.0, and NaN does not equal itself.
        return type(value), repr(value)
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple | set | frozenset):
        keys = [_key(each, references) for each in value]
        return tuple(keys) if isinstance(value, list | tuple) else frozenset(keys)
    if isinstance(value, re.Pattern) or is_from(OWN_PACKAGES, type(value).__module__):
        references.append(weakref.ref(value))
        return id(value)
    return object()


def _function(run: Callable[..., None], **options: Any) -> Any:  # noqa: ANN401 - TensorFlow ships no types
    # Not the method itself: TensorFlow would take programs for one that is traced too often, as they share its code.
    return tf.function(functools.partial(run), autograph=False, **options)


class UpdateCompiler:
    """Says whether XLA compiles the update of an optimizer, to which it refers weakly, and has what eager code keeps.

    With `jit_compile="auto"` it is compiled if the variables are large and only Keras' own code takes part: a user's
    code may do what XLA cannot compile, such as printing. With True it is compiled with a user's code too, but not in
    eager code, which keeps the program: a user's code may depend on anything. It is never compiled

    * within a step that XLA compiles already;
    * on the replicas of a strategy, which sum the gradients when the optimizer applies them;
    * while `tf.debugging.enable_check_numerics` or `tf.debugging.experimental.enable_dump_debug_info` is on, because
      XLA does not have the ops that they add. A warning says so once.
    """

    def __init__(self, optimizer: _Optimizer, jit_compile: JitCompile) -> None:
        self._reference = weakref.ref(optimizer)
        self._jit_compile = jit_compile
        self._told_of_debugging = False
        self._last_asked: tuple[list[int], bool] = ([], False)
        self.own_code = OwnCode()
        #: The programs of eager code, those used last at the end.
        self.programs: dict[Hashable, _Kept] = {}

    @property
    def optimizer(self) -> _Optimizer:
        """The optimizer."""
        return self._reference()

    def is_by_keras_alone(self, variables: Sequence[_Variable]) -> bool:
        """Return whether only Keras' own code takes part in the update of these variables."""
        return self.own_code.runs_alone(self.parts(variables))

    def parts(self, variables: Sequence[_Variable]) -> list[object]:
        """Return the objects whose code computes an update: optimizers, schedules and constraints."""
        optimizers = [self.optimizer, *_inner_optimizers(self.optimizer)]
        rates = map(learning_rate_or_schedule, optimizers)
        constraints = (getattr(variable, "constraint", None) for variable in variables)
        # In Keras 2 a learning rate that is no schedule is a variable of TensorFlow's.
        parts = [each for each in [*rates, *constraints] if not (each is None or isinstance(each, tf.Variable))]
        return [*optimizers, *parts]

    def compiles(self, variables: Sequence[_Variable]) -> bool:
        """Return whether the update of these variables is a compiled program of its own."""
        if not self._jit_compile or within_xla() or tf.distribute.has_strategy():
            return False
        if self._jit_compile == "auto" and not (self._saves_time(variables) and _has_no_conditional(self.optimizer)):
            return False
        may_be_of_user = self._jit_compile != "auto" and not tf.executing_eagerly()
        return (may_be_of_user or self.is_by_keras_alone(variables)) and not self._is_debugged()

    def _saves_time(self, variables: Sequence[_Variable]) -> bool:
        # In eager code each step asks, about the same variables.
        asked, answer = self._last_asked
        now = list(map(id, variables))
        if asked != now:
            by_keras = self.is_by_keras_alone(variables)
            compiled = num_compiled(self.optimizer, variables) if by_keras else len(variables)
            answer = saves_time(list(map(of_tensorflow, variables)), compiled)
            self._last_asked = now, answer
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


class UpdateCompilers:
    """The compilers of optimizers, one for each; those of optimizers that are gone are forgotten. Copies are empty."""

    def __init__(self, jit_compile: JitCompile) -> None:
        self._jit_compile = jit_compile
        self._each: weakref.WeakKeyDictionary[_Optimizer, UpdateCompiler] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["UpdateCompilers"], tuple[JitCompile]]:
        return UpdateCompilers, (self._jit_compile,)

    def of(self, optimizer: _Optimizer) -> UpdateCompiler:
        """Return the compiler of an optimizer of Keras 2 or Keras 3."""
        if optimizer not in self._each:
            self._each[optimizer] = UpdateCompiler(optimizer, self._jit_compile)
        return self._each[optimizer]


def validated_jit_compile(value: object) -> JitCompile:
    """Return a setting of this name, or raise an error if it is none."""
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError(f'jit_compile must be True, False or "auto", got {value!r}.')


def saves_time(variables: Sequence[tf.Variable], num_compiled: int) -> bool:
    """Return whether compiling the update of these variables is possible on their device and saves time.

    The time to compile grows with `num_compiled`, the number of variables whose updates are compiled: those that are
    alike share programs. The time saved at each step grows with the number of values. Without compiling, the time to
    build the graph grows with the number of all variables.
    """
    values = sum(math.prod(variable.shape) for variable in variables)
    is_worth_it = values >= max(_MANY, _MANY_FOR_EACH * num_compiled) or 0 < _SHARING * num_compiled <= len(variables)
    # An XLA program runs on a single device.
    is_on_one_device = len({variable.device for variable in variables}) == 1
    return is_worth_it and is_on_one_device and not has_apple_gpu()


def _has_no_conditional(optimizer: _Optimizer) -> bool:
    """Return whether an update of Keras' own contains no conditional, which would copy variables in an XLA program."""
    # The settings of a MultiOptimizer say nothing about the optimizers inside it. The optimizers of Keras 2 do not
    # accumulate gradients.
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    return not (_inner_optimizers(optimizer) or optimizer.ema_overwrite_frequency or accumulates)


def _inner_optimizers(optimizer: _Optimizer) -> list[_Optimizer]:
    # Only a MultiOptimizer has some. Older versions of Keras do not have this class.
    return list(getattr(optimizer, "optimizers", []))


def _clips_by_global_norm(optimizer: _Optimizer) -> bool:
    """Return whether the optimizer clips the gradients of every call by their global norm."""
    # If both settings are there, Keras uses clipnorm only. An optimizer that accumulates gradients clips their sums, at
    # the end of each window.
    of_each, of_all = ((norm or 0) > 0 for norm in (optimizer.clipnorm, optimizer.global_clipnorm))
    return of_all and not of_each and not getattr(optimizer, "gradient_accumulation_steps", None)
