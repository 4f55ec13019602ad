"""Decides whether the update of variables by an optimizer of Keras is compiled by XLA."""

import logging
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.tensorflow_internals import ops_are_watched, within_xla
from tfmp.hosts.keras.internals import learning_rate_or_schedule
from tfmp.hosts.keras.own_code import OwnCode
from tfmp.hosts.keras.programs.alike import StateOfVariables, can_share_programs
from tfmp.hosts.keras.programs.kept_programs import KeptPrograms
from tfmp.hosts.keras.views import of_tensorflow

_logger = logging.getLogger("tfmp")

#: The smallest numbers of values, in all variables together and for each update that is compiled, for which compiling
#: saves time. With fewer values the compilation takes longer than what it saves in hundreds of steps.
_MANY = 2**20
_MANY_FOR_EACH = 2**14
#: The number of variables for each update that is compiled from which compiling takes less time than building a graph.
_SHARING = 8

#: Whether to compile an update: True, False, or "auto", which compiles where that saves time.
JitCompile: TypeAlias = bool | str
# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any


class UpdateCompiler:
    """Says whether the update of an optimizer of Keras 2 or Keras 3 is compiled, and has the programs of eager mode.

    With `jit_compile="auto"` the update is compiled if the variables are large and if the optimizer, its schedule and
    the constraints of the variables are all Keras' own: a user's code may do what XLA cannot compile, such as printing.
    With True it is compiled with a user's code too, in a `tf.function`. In eager mode the compiled program is kept and
    run again while no setting changes; because a user's code may depend on anything, only Keras' own is compiled there.
    A method that a user puts in the place of one of Keras', on the optimizer or on its class, is a user's code. The
    optimizer is referred to weakly. The update is never compiled

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
        self._own_code = OwnCode()
        self._own_optimizer = OwnCode()
        #: The programs that eager mode keeps.
        self.programs = KeptPrograms()

    @property
    def optimizer(self) -> _Optimizer:
        """The optimizer."""
        return self._reference()

    @property
    def is_of_own_code(self) -> bool:
        """True if the optimizer is of a class of Keras, and none of its methods was replaced."""
        return self._own_optimizer.runs_alone([self.optimizer])

    @property
    def code_version(self) -> int:
        """A number that changes whenever a method of the optimizer's class, or of its schedule's, is replaced."""
        return self._own_code.version

    def compiles(self, variables: Sequence[_Variable]) -> bool:
        """Return whether the update of these variables is a compiled program of its own."""
        if not self._jit_compile or not can_be_own_program():
            return False
        if self._jit_compile == "auto":
            is_wanted = self._saves_time(variables) and self._suits_xla(variables)
        else:
            is_wanted = not tf.executing_eagerly() or self.is_by_keras_alone(variables)
        return is_wanted and not self._is_debugged()

    def is_by_keras_alone(self, variables: Sequence[_Variable]) -> bool:
        """Return whether only Keras' own code takes part in the update of these variables."""
        return self._own_code.runs_alone(_parts_with_code(self.optimizer, variables))

    def _suits_xla(self, variables: Sequence[_Variable]) -> bool:
        # A user's code may do what XLA cannot compile, such as printing.
        return _has_no_conditional(self.optimizer) and self.is_by_keras_alone(variables)

    def _saves_time(self, variables: Sequence[_Variable]) -> bool:
        # In eager mode each step asks, about the same variables.
        asked, answer = self._last_asked
        now = list(map(id, variables))
        if asked != now:
            answer = saves_time(list(map(of_tensorflow, variables)), self._num_compiled(variables))
            self._last_asked = now, answer
        return answer

    def _num_compiled(self, variables: Sequence[_Variable]) -> int:
        can_share = can_share_programs(self.optimizer, variables) and self.is_by_keras_alone(variables)
        return StateOfVariables(self.optimizer).num_compiled(variables) if can_share else len(variables)

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
    """Return a setting of this name, or raise an error if it is none."""
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError(f'jit_compile must be True, False or "auto", got {value!r}.')


class UpdateCompilers:
    """The compilers of optimizers, one for each; those of optimizers that are gone are forgotten.

    Copies of this object are empty.
    """

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


def can_be_own_program() -> bool:
    """Return whether an update at this point can be a compiled program of its own.

    It cannot be one if XLA compiles the whole step already, or if the replicas of a `tf.distribute` strategy update
    variables together.
    """
    return not (within_xla() or tf.distribute.has_strategy())


def saves_time(variables: Sequence[tf.Variable], num_compiled: int) -> bool:
    """Return whether compiling the update of these variables is possible on their device and saves time.

    The time to compile grows with `num_compiled`, the number of variables whose updates are compiled: those that are
    alike share programs. The time saved at each step grows with the number of values. So there must be at least 2**20
    values, and 2**14 for each update that is compiled. Without compiling, the time to build the graph grows with the
    number of all variables; compiling takes less if each program updates 8 or more. All variables must be on one
    device, which must not be an Apple GPU.
    """
    values = sum(math.prod(variable.shape) for variable in variables)
    is_worth_it = values >= max(_MANY, _MANY_FOR_EACH * num_compiled) or 0 < _SHARING * num_compiled <= len(variables)
    # An XLA program runs on a single device.
    is_on_one_device = len({variable.device for variable in variables}) == 1
    return is_worth_it and is_on_one_device and not has_apple_gpu()


def has_apple_gpu() -> bool:
    """Return whether the default device is an Apple GPU, for which XLA compiles nothing."""
    return sys.platform == "darwin" and bool(tf.config.list_physical_devices("GPU"))


def _has_no_conditional(optimizer: _Optimizer) -> bool:
    """Return whether an update of Keras' own contains no conditional, which would copy variables in an XLA program."""
    # The settings of a MultiOptimizer say nothing about the optimizers inside it. The optimizers of Keras 2 do not
    # accumulate gradients.
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    return not (_inner_optimizers(optimizer) or optimizer.ema_overwrite_frequency or accumulates)


def _parts_with_code(optimizer: _Optimizer, variables: Sequence[_Variable]) -> list[object]:
    """Return the objects whose code computes an update: the optimizer, its schedule and the constraints."""
    optimizers = [optimizer, *_inner_optimizers(optimizer)]
    rates = map(learning_rate_or_schedule, optimizers)
    constraints = [getattr(variable, "constraint", None) for variable in variables]
    # In Keras 2 a learning rate that is no schedule is a variable of TensorFlow's.
    parts = [each for each in [*rates, *constraints] if not (each is None or isinstance(each, tf.Variable))]
    return [*optimizers, *parts]


def _inner_optimizers(optimizer: _Optimizer) -> list[_Optimizer]:
    # Only a MultiOptimizer has some. Older versions of Keras do not have this class.
    return list(getattr(optimizer, "optimizers", []))
