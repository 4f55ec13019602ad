"""Unscales gradients and applies them by an optimizer of Keras, as a program of XLA where that saves time."""

import functools
import logging
import math
import operator
import re
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.any_keras.internals import learning_rate_or_schedule, view_of
from tfmp.any_keras.which import (
    OWN_PACKAGES,
    is_foreign,
    is_from,
    is_of_keras,
    is_optimizer_of_keras3,
    of_tensorflow,
)
from tfmp.core.gradients import arithmetic
from tfmp.core.tensorflow_internals import TRACKING_PREFIX, ops_are_watched, unrecorded, within_xla
from tfmp.core.tracing import has_apple_gpu
from tfmp.hosts.keras.shared_programs import num_compiled, run_shared
from tfmp.types import Done, Gradients

_logger = logging.getLogger("tfmp")

#: The smallest numbers of values, of all variables and for each compiled update, for which compiling saves more time in
#: hundreds of steps than it takes.
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


class KerasProgram(NamedTuple):
    """Unscales gradients and applies them by an optimizer that is built; made anew for each step.

        in a function    optimizer.apply(grads / scale) as a program that XLA compiles
        in eager code    the same, which is kept, and run again while no setting changes
        within XLA       a part of the program that XLA compiles anyway

    Eager code keeps this object, which therefore holds no gradients, and the optimizer only weakly.
    """

    programs: "UpdatePrograms"
    #: The indices of the gradients that are passed to the optimizer, and the variables that they are for.
    taken: Sequence[int]
    variables: Sequence[_Variable]
    #: "apply_gradients", or "apply" of Keras 3.
    method: str
    #: Keyword arguments for the `apply_gradients` of Keras 2.
    options: Mapping[str, Any]

    @property
    def clips(self) -> bool:
        """True if it clips by the global norm, which the step computes beside its check.

        Within the optimizer XLA would sum the squares again, and slowly, on one core.
        """
        optimizer = self.programs.optimizer()
        # Keras prefers clipnorm, clips the sums of a window at its end, and a user's code may change gradients before.
        of_each, of_all = ((norm or 0) > 0 for norm in (optimizer.clipnorm, optimizer.global_clipnorm))
        clips = of_all and not of_each and not getattr(optimizer, "gradient_accumulation_steps", None)
        return clips and self.programs.is_by_keras_alone(self.variables)

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide the gradients by the loss scale, clip and apply them."""
        taken = [grads[index] for index in self.taken]
        tensors = [loss_scale] if norm is None else [loss_scale, norm]
        # A tape around the call would need a gradient of the program.
        with unrecorded():
            if within_xla():
                self._update(self.programs.optimizer(), self.variables, taken, tensors)
            elif tf.executing_eagerly():
                self._run_kept(taken, tensors)
            else:
                self._run_compiled(taken, tensors)
        return tf.no_op()

    def _update(
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
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True, **self.options)
            return
        arguments = (list(grads), variables) if self.method == "apply" else (pairs,)
        apply = functools.partial(getattr(optimizer, self.method), *arguments)
        # Keras 3 sums gradients over replicas, even over one: TensorFlow (2.15 to 2.21) would then keep the graph, and
        # the values of all variables in it, until the process ends.
        context = tf.distribute.get_replica_context()
        if context is None:
            apply()
        else:
            context.merge_call(lambda _: apply())

    def _run_compiled(self, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        """Update the variables in a `tf.function` by a compiled program, or by several that variables share."""
        optimizer = self.programs.optimizer()
        clips_all = optimizer.global_clipnorm is not None and len(tensors) == 1
        can_be_split = not clips_all and self.programs.is_by_keras_alone(self.variables)
        if can_be_split and run_shared(self._update, optimizer, self.variables, grads, tensors):
            return
        program = _function(self._update, optimizer, self.variables, jit_compile=True)
        # XLA compiles it again for every new shape.
        program([arithmetic.pad_rows(grad) for grad in grads], tensors)

    def _run_kept(self, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        """Update the variables in eager code by the program that was traced with these settings, from the second on."""
        kept, key = self.programs.kept, self._key_of_settings(len(tensors))
        if key in kept:
            # The numbers of rows of sparse gradients differ between calls.
            program = kept.pop(key) or _function(self._run_compiled, reduce_retracing=True)
            program(grads, tensors)
            kept[key] = program
            return
        self._update(self.programs.optimizer(), self.variables, grads, tensors)
        # A program would not repeat what the optimizer changes in Python at each step, as Nadam of Keras 2 does.
        # Attributes that it only notes once are there at the next step.
        if self._key_of_settings(len(tensors)) == key:
            kept[key] = None
            if len(kept) > _MOST_KEPT:
                del kept[next(iter(kept))]

    def _key_of_settings(self, num_tensors: int) -> Hashable:
        """Return what is equal while only the arguments of the update and the values of variables change."""
        parts = self.programs.parts(self.variables)
        own = [[item for item in vars(part).items() if not item[0].startswith(TRACKING_PREFIX)] for part in parts]
        names = ("trainable", "constraint", "overwrite_with_gradient")
        of_variables = [[each, *(getattr(each, name, None) for name in names)] for each in self.variables]
        return _comparable([parts, own, of_variables, self.programs.version, self.method, self.options, num_tensors])


def _comparable(value: Any) -> Hashable:  # noqa: ANN401 - whatever a setting may be
    """Return what is equal for settings that are the same; what may change unseen equals nothing."""
    if value is None or isinstance(value, int | float | complex | str | bytes | np.generic):
        # As text: 1 equals True, 0.0 equals -0.0, and NaN does not equal itself.
        return type(value), repr(value)
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_comparable, value))
    is_known = isinstance(value, re.Pattern) or is_from(OWN_PACKAGES, type(value).__module__)
    return _Identity(value) if is_known else object()


class _Identity:
    """Is equal for one object while this lives; another one may get its `id` afterwards."""

    def __init__(self, value: object) -> None:
        self._id, self._reference = id(value), weakref.ref(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return value is not None and isinstance(other, _Identity) and other._reference() is value


def _function(run: Callable[..., None], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - TensorFlow has no types
    # TensorFlow would warn of retracing, as programs share the code of a method.
    return tf.function(functools.partial(run, *arguments), autograph=False, **options)


class UpdatePrograms:
    """The programs of one optimizer, held weakly: says which updates XLA compiles, and has those that eager code keeps.

    With "auto", a user's code is never compiled, since it may print, for example. With True it is compiled, but not in
    eager code, which keeps the program: a user's code may depend on anything.
    """

    def __init__(self, optimizer: _Optimizer, jit_compile: JitCompile) -> None:
        self.optimizer: Callable[[], _Optimizer] = weakref.ref(optimizer)
        self._jit_compile = jit_compile
        self._told_of_debugging = False
        self._last_asked: tuple[list[int], bool] = ([], False)
        #: The programs of eager code by their settings, those used last at the end; None after the first update.
        self.kept: dict[Hashable, Any] = {}
        #: Changes whenever anything in the classes of an update is replaced, by Keras' own code too.
        self.version = 0
        self._classes: dict[type, tuple[Sequence[object], bool]] = {}

    def parts(self, variables: Sequence[_Variable]) -> list[object]:
        """Return the objects whose code computes an update: optimizers, schedules and constraints."""
        optimizers = with_inner(self.optimizer())
        rates = map(learning_rate_or_schedule, optimizers)
        constraints = (getattr(variable, "constraint", None) for variable in variables)
        # In Keras 2 a constant learning rate is a variable.
        parts = [each for each in [*rates, *constraints] if not (each is None or isinstance(each, tf.Variable))]
        return [*optimizers, *parts]

    def is_by_keras_alone(self, variables: Sequence[_Variable]) -> bool:
        """Return whether only Keras' own code takes part in the update of these variables."""
        return self.runs_keras_alone(self.parts(variables))

    def runs_keras_alone(self, objects: Sequence[object]) -> bool:
        """Return whether objects are of classes of Keras, in which, and on which, no method was replaced."""
        attributes = (value for each in objects for value in vars(each).values())
        if not all(map(is_of_keras, objects)) or any(map(is_foreign, attributes)):
            return False
        classes = dict.fromkeys(cls for each in objects for cls in type(each).__mro__)
        for cls in classes:
            # Comparing with the last call is faster than judging.
            held = list(vars(cls).values())
            last, _ = self._classes.get(cls, ([], False))
            # By identity: arrays and variables have no single answer to `==`.
            if len(held) != len(last) or not all(map(operator.is_, held, last)):
                self._classes[cls] = held, not any(map(is_foreign, held))
                self.version += 1
        return all(self._classes[cls][1] for cls in classes)

    def compiles(self, variables: Sequence[_Variable]) -> bool:
        """Return whether the update of these variables is a compiled program of its own."""
        is_auto = self._jit_compile == "auto"
        if not self._jit_compile or (is_auto and not self._saves_time(variables)):
            return False
        may_be_of_user = not is_auto and not tf.executing_eagerly()
        return (may_be_of_user or self.is_by_keras_alone(variables)) and not self._is_debugged()

    def _saves_time(self, variables: Sequence[_Variable]) -> bool:
        # The two settings make conditionals, which copy variables in XLA. Those in a MultiOptimizer are others.
        unfit = ("optimizers", "ema_overwrite_frequency", "gradient_accumulation_steps")
        if any(getattr(self.optimizer(), name, None) for name in unfit):
            return False
        # In eager code each step asks, about the same variables.
        now = list(map(id, variables))
        if self._last_asked[0] != now:
            self._last_asked = now, self._is_worth_it(variables)
        return self._last_asked[1]

    def _is_worth_it(self, variables: Sequence[_Variable]) -> bool:
        """Return whether compiling is possible on the device of the variables, and saves time.

        The time to compile grows with the number of updates that are compiled, the time saved at each step with the
        number of values, and the time to build a graph without compiling with the number of all variables.
        """
        values = sum(math.prod(variable.shape) for variable in variables)
        # An XLA program runs on a single device.
        is_on_one_device = len({of_tensorflow(variable).device for variable in variables}) == 1
        if (values < _MANY and len(variables) < _SHARING) or not is_on_one_device or has_apple_gpu():
            return False
        shares = self.is_by_keras_alone(variables)
        compiled = num_compiled(self.optimizer(), variables) if shares else len(variables)
        return values >= max(_MANY, _MANY_FOR_EACH * compiled) or _SHARING * compiled <= len(variables)

    def _is_debugged(self) -> bool:
        watched = ops_are_watched()
        if watched and not self._told_of_debugging:
            self._told_of_debugging = True
            _logger.warning(
                "the update of the variables is not compiled, as with jit_compile=False: check numerics or the dump of "
                "debug info (tf.debugging) is on, and XLA does not have the ops that these add."
            )
        return watched


class ProgramsByOptimizer:
    """The programs of each optimizer. Those of optimizers that are gone are forgotten; copies are empty."""

    def __init__(self, jit_compile: JitCompile) -> None:
        if not (isinstance(jit_compile, bool) or jit_compile == "auto"):
            raise ValueError(f'jit_compile must be True, False or "auto", got {jit_compile!r}.')
        self._jit_compile = jit_compile
        self._each: weakref.WeakKeyDictionary[_Optimizer, UpdatePrograms] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["ProgramsByOptimizer"], tuple[JitCompile]]:
        return ProgramsByOptimizer, (self._jit_compile,)

    def of(self, optimizer: _Optimizer) -> UpdatePrograms:
        """Return the programs of an optimizer of Keras 2 or Keras 3."""
        if optimizer not in self._each:
            self._each[optimizer] = UpdatePrograms(optimizer, self._jit_compile)
        return self._each[optimizer]


def with_inner(optimizer: _Optimizer) -> list[_Optimizer]:
    """Return an optimizer, and those inside it if it is a `MultiOptimizer`, a class of newer versions of Keras 3."""
    return [optimizer, *getattr(optimizer, "optimizers", [])]
