"""Measures the peak memory of a function call, or of all that a process does."""

import concurrent.futures
import contextlib
import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest import mock

import tensorflow as tf

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PROCESS = Path("/proc/self")


def in_own_process(
    measure: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Call a function that measures memory in a new process without oneDNN, and return its result.

    With oneDNN, the default on x86, TensorFlow keeps all memory that it ever had from the system, so that the peak of
    repeated work hardly shows. The new process runs without oneDNN; therefore it is not used to measure times.

    Args:
        measure: A function at the top level of a module, so that it can be pickled.
        *args: Arguments of the function; they and the result must be picklable.
        **kwargs: Keyword arguments of the function, picklable too.
    """
    with mock.patch.dict(os.environ, {"TF_ENABLE_ONEDNN_OPTS": "0"}):
        return in_new_process(measure, *args, **kwargs)


def in_new_process(
    measure: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Call a function in a new process, and return its result.

    Args:
        measure: A function at the top level of a module, so that it can be pickled.
        *args: Arguments of the function; they and the result must be picklable.
        **kwargs: Keyword arguments of the function, picklable too.
    """
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawning) as process:
        return process.submit(measure, *args, **kwargs).result()


def during(run: Callable[[], object]) -> int | None:
    """Return the peak memory while a function runs, in bytes above the memory in use before.

    Args:
        run: The function; it is called once, even where memory cannot be measured.

    Returns:
        The bytes, or None where the system does not provide them: outside Linux, and in some containers.
    """
    gc.collect()
    # Memory that was freed but kept by the C library would hide later allocations. Only glibc has `malloc_trim`; where
    # no C library can be loaded, ctypes raises TypeError.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        # Writing 5 resets the process' peak memory: see the manual page proc(5).
        (_PROCESS / "clear_refs").write_text("5")
        before = _status("VmRSS")
    except (OSError, StopIteration):
        run()
        return None
    run()
    return _status("VmHWM") - before


def of_process() -> int | None:
    """Return the most memory that this process had so far, in bytes; None where the system does not say it."""
    try:
        return _status("VmHWM")
    except (OSError, StopIteration):
        return None


def device_of_allocator() -> str:
    """Return the device whose memory is measured: the first GPU, or the CPU if there is none."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


class Allocator:
    """The peak of TensorFlow's allocator since this object was made: of the first GPU, or of the CPU if there is none.

    It counts the bytes in use, of weights too, and not what the allocator keeps for later. On a CPU it counts tensors
    of 256 KiB or more, and there are figures only with oneDNN, the default on x86.
    """

    def __init__(self) -> None:
        self._device = device_of_allocator()
        with contextlib.suppress(ValueError):
            tf.config.experimental.reset_memory_stats(self._device)

    def peak(self) -> int | None:
        """Return the bytes, or None if the allocator has no figures."""
        try:
            return int(tf.config.experimental.get_memory_info(self._device)["peak"])
        except ValueError:
            return None


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
