"""How much memory a piece of work needs at its peak."""

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

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PROCESS = Path("/proc/self")


def in_own_process(
    measure: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Return what a function returns that measures memory, from a process where memory can be measured.

    With oneDNN, its default on x86, TensorFlow keeps all memory that it ever had from the system, and the peak of what
    runs again hardly shows. The process is without, and so not one to take times in.

    Args:
        measure: A function of a module; it can only use what it imports and is given.
        *args: For the function; of types that can be pickled, like its result.
        **kwargs: The same.
    """
    own = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, {"TF_ENABLE_ONEDNN_OPTS": "0"}),
        concurrent.futures.ProcessPoolExecutor(1, mp_context=own) as process,
    ):
        return process.submit(measure, *args, **kwargs).result()


def during(run: Callable[[], object]) -> int | None:
    """Return how many bytes more than before are in use at most while something runs.

    Args:
        run: What needs memory; it is run once, whatever is known of it.

    Returns:
        The bytes, or None where the system does not tell: outside of Linux, and in some containers.
    """
    gc.collect()
    # What was freed but is kept would hide what is taken again. Only glibc has this; where there is no C library to
    # ask, ctypes raises TypeError.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        # 5 starts the record of the peak anew: proc(5).
        (_PROCESS / "clear_refs").write_text("5")
        before = _status("VmRSS")
    except (OSError, StopIteration):
        run()
        return None
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
