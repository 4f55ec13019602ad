"""Stand-ins for processes that train together: in place of `horovod.tensorflow`, and in place of a distribution."""

import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf
from recording_adapters import numbers

from tfmp.core.distribute import SingleProcess
from tfmp.types import Gradient, Gradients


class Workers(SingleProcess):
    """Two workers, of which the other has no gradients; keeps what they are asked."""

    def __init__(self) -> None:
        self.averaged: list[Any] = []
        self.agreed: list[bool] = []

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        self.averaged.append((numbers(grads), list(names), dtype))
        return [None if grad is None else grad / 2 for grad in grads]

    def agree(self, answers: Sequence[tf.Tensor], grads: Gradients, names: Sequence[str]) -> list[tf.Tensor]:
        self.agreed.append(not answers[0])
        return super().agree(answers, grads, names)


def run_horovod(monkeypatch: pytest.MonkeyPatch, size: int, *, is_initialized: bool = True) -> types.ModuleType:
    """Let the program look until the end of the test as if Horovod ran so many processes; return the module."""
    horovod = types.ModuleType("horovod.tensorflow")
    horovod.is_initialized = lambda: is_initialized
    horovod.size = lambda: size
    horovod.Sum = "sum"
    # As if each process sent the same.
    horovod.allreduce = lambda values, op, name: values * size
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
    return horovod
