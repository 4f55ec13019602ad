"""A module in place of `horovod.tensorflow`, for what tfmp asks it before any process is reached."""

import sys
import types

import pytest


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
