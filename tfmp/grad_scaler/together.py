"""One adapter for several optimizers that step together or not at all."""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter, Program
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
        return tf.group(*(apply_unscaled(adapter, part) for adapter, part in self._with_own(grads)))

    def program(self, grads: Gradients) -> Program | None:
        """Return what runs the programs of all optimizers; None unless all of them have one."""
        programs = [adapter.program(part) for adapter, part in self._with_own(grads)]
        found = [program for program in programs if program is not None]
        return _ProgramsTogether(self, found) if len(found) == len(programs) else None

    def _with_own(self, grads: Gradients) -> list[tuple[OptimizerAdapter, Gradients]]:
        """Return each adapter with its part of the gradients."""
        rest = iter(grads)
        return [(adapter, list(itertools.islice(rest, len(adapter.variables)))) for adapter in self._adapters]


class _ProgramsTogether:
    """Runs the programs of several optimizers, one after the other; each optimizer clips its own gradients."""

    clips = False

    def __init__(self, adapter: AdaptersTogether, programs: Sequence[Program]) -> None:
        self._adapter = adapter
        self._programs = programs

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide the gradients by the loss scale, clip and apply them."""
        del norm
        parts = zip(self._programs, self._adapter._with_own(grads), strict=True)
        return tf.group(*(program.run(part, loss_scale, None) for program, (_, part) in parts))


def apply_unscaled(adapter: OptimizerAdapter, grads: Gradients) -> Done:
    """Apply gradients in true magnitude: by the optimizer's program, or by the optimizer itself if it has none."""
    program = adapter.program(grads)
    return adapter.apply(grads) if program is None else program.run(grads, tf.ones([]), None)
