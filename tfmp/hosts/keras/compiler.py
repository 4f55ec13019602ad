"""Whether the update of variables by an optimizer of Keras is compiled by XLA."""

import logging
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.tracing import ops_are_watched
from tfmp.hosts.keras.conditions import (
    can_be_compiled,
    has_no_conditional,
    of_tensorflow,
    parts_with_code,
    worth_compiling,
)
from tfmp.hosts.keras.kept_programs import KeptPrograms
from tfmp.hosts.keras.own_code import OwnCode
from tfmp.hosts.keras.replicas import can_be_compiled_on_replicas
from tfmp.types import Gradients

_logger = logging.getLogger("tfmp")

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
    * on the replicas of a strategy, unless each of them can run a program of its own;
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
        """Return whether the update of these variables is compiled."""
        return self._is_to_be_compiled(variables) and not self._is_debugged()

    def compiles_on_replicas(self, grads: Gradients, variables: Sequence[_Variable]) -> bool:
        """Return whether each replica updates these variables by a program of its own; only for Keras 3."""
        if not self._jit_compile or not can_be_compiled_on_replicas(self.optimizer, grads):
            return False
        is_large = self._jit_compile is True or self._is_worth_compiling(variables)
        scales = self.optimizer.loss_scale_factor is not None
        return is_large and not scales and self._suits_xla(variables) and not self._is_debugged()

    def _is_to_be_compiled(self, variables: Sequence[_Variable]) -> bool:
        if not self._jit_compile or not can_be_compiled():
            return False
        if self._jit_compile == "auto":
            return self._is_worth_compiling(variables) and self._suits_xla(variables)
        return not tf.executing_eagerly() or self.is_by_keras_alone(variables)

    def _suits_xla(self, variables: Sequence[_Variable]) -> bool:
        # A user's code may do what XLA cannot compile, such as printing.
        return has_no_conditional(self.optimizer) and self.is_by_keras_alone(variables)

    def is_by_keras_alone(self, variables: Sequence[_Variable]) -> bool:
        """Return whether only Keras' own code takes part in the update of these variables."""
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
