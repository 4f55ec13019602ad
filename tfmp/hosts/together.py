"""One adapter for several optimizers that step together or not at all."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.hosts.keras.program import KerasProgram, ProgramsTogether
from tfmp.types import Done, Gradients


class AdaptersTogether(OptimizerAdapter):
    """Treats the optimizers of several adapters as one optimizer, whose gradients are those of all in one list.

    Args:
        adapters: One adapter for each optimizer, in the order in which their gradients stand in that list.
    """

    def __init__(self, adapters: Sequence[OptimizerAdapter]) -> None:
        super().__init__(None, [variable for adapter in adapters for variable in adapter.variables])
        self.dtypes = [dtype for adapter in adapters for dtype in adapter.dtypes]
        self._adapters = adapters

    def apply(self, grads: Gradients) -> Done:
        """Let each optimizer apply its own part of the gradients."""
        return tf.group(*(adapter.apply(part) for adapter, part in self._with_own(grads)))

    def program(self, grads: Gradients) -> ProgramsTogether | None:
        """Return a program that runs those of all optimizers; None unless all of them are of Keras and have one."""
        programs = [adapter.program(part) for adapter, part in self._with_own(grads)]
        of_keras = [program for program in programs if isinstance(program, KerasProgram)]
        return ProgramsTogether(of_keras) if len(of_keras) == len(programs) else None

    def _with_own(self, grads: Gradients) -> list[tuple[OptimizerAdapter, Gradients]]:
        """Return each adapter with its part of the gradients."""
        rest = iter(grads)
        return [(adapter, list(itertools.islice(rest, len(adapter.variables)))) for adapter in self._adapters]
