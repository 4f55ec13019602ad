"""One adapter for several optimizers that step together or not at all."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter, Program
from tfmp.hosts.keras.programs.program import KerasProgram, ProgramsTogether, split
from tfmp.types import Done, Gradients


class AdaptersTogether(OptimizerAdapter):
    """Treats the optimizers of several adapters as one optimizer, whose gradients are those of all in one list."""

    def __init__(self, adapters: Sequence[OptimizerAdapter]) -> None:
        super().__init__(None, [variable for adapter in adapters for variable in adapter.variables])
        self.dtypes = [dtype for adapter in adapters for dtype in adapter.dtypes]
        self._adapters = adapters

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers of all adapters."""
        return [adapter.optimizer for adapter in self._adapters]

    def apply(self, grads: Gradients) -> Done:
        """Let each optimizer apply its own part of the gradients."""
        return tf.group(*(adapter.apply(part) for adapter, part in _with_own(self._adapters, grads)))

    def program(self, grads: Gradients) -> Program | None:
        """Return a program that runs those of all optimizers; None unless all of them are of Keras and have one."""
        programs = [adapter.program(part) for adapter, part in _with_own(self._adapters, grads)]
        of_keras = [program for program in programs if isinstance(program, KerasProgram)]
        return ProgramsTogether(of_keras) if len(of_keras) == len(programs) else None


def _with_own(adapters: Sequence[OptimizerAdapter], grads: Gradients) -> list[tuple[OptimizerAdapter, Gradients]]:
    """Return each adapter with its part of the gradients."""
    parts = split(grads, [len(adapter.variables) for adapter in adapters])
    return list(zip(adapters, parts, strict=True))
