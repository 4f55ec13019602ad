"""Rewrites many files, in several processes if that is worth their start."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NamedTuple

from tfmp.migrate.cli import files
from tfmp.migrate.cli.processing import FileReport, Job, process

# A process needs some tenths of a second to start, which is also the time for a few dozen files.
_FILES_WORTH_PROCESSES = 48
# Seconds between two checks for an interrupt, and seconds to wait for unfinished files after one.
_GLANCE = 0.1
_PATIENCE = 2.0


class Outcome(NamedTuple):
    """The reports of the files of a run.

    Attributes:
        reports: One report for each file, in the order of the files. After an interrupt, only of the finished files.
        interrupted: True if an interrupt ended the run.
    """

    reports: list[FileReport]
    interrupted: bool


def process_all(found: Sequence[files.Found], job: Job, progress: Callable[[], object] = lambda: None) -> Outcome:
    """Rewrite files. Many files are shared among as many processes as there are cores.

    After an interrupt (Ctrl-C), no further file is started, and the unfinished files have some seconds to be finished.
    A second interrupt ends them at once.

    Args:
        found: The files to rewrite.
        job: The work to do on each file.
        progress: Called after each finished file.

    Returns:
        The reports of the files, and whether the run was interrupted.

    Example:
        >>> process_all([], Job())
        Outcome(reports=[], interrupted=False)
    """
    reports: dict[int, FileReport] = {}

    def done(number: int, report: FileReport) -> None:
        reports[number] = report
        progress()

    with _Interrupts() as interrupts:
        try:
            processes = min(_cores(), len(found) // (_FILES_WORTH_PROCESSES // 2))
            if processes > 1:
                # The system may refuse another process.
                with contextlib.suppress(OSError):
                    _in_processes(processes, found, job, done, interrupts)
            # All files if they are few; else only files whose process was killed.
            for number, one in enumerate(found):
                if number not in reports and not interrupts.any:
                    done(number, process(one, job))
        except KeyboardInterrupt:
            interrupts.any = True
    return Outcome([reports[number] for number in sorted(reports)], interrupts.any)


class _Interrupts:
    """Records the first interrupt instead of raising: an exception could separate a written file from its report."""

    def __init__(self) -> None:
        self.any = False
        self._before: Any = None  # a handler is a function, a number, or an enumeration's member

    def __enter__(self) -> "_Interrupts":
        # Only the main thread may set a handler. If interrupts are ignored, as under nohup, they stay ignored.
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if before is signal.default_int_handler:
                self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.any:
            signal.default_int_handler(number, frame)
        self.any = True


def _in_processes(
    number: int,
    found: Sequence[files.Found],
    job: Job,
    done: Callable[[int, FileReport], None],
    interrupts: _Interrupts,
) -> None:
    """Rewrite files in several processes. A file whose process is killed gets no report."""
    queue = iter(range(len(found)))
    busy: dict[Connection, int] = {}
    workers: list[multiprocessing.process.BaseProcess] = []
    try:
        for _ in range(number):
            worker, pipe = _started(job)
            workers.append(worker)
            _give(pipe, queue, found, busy)
        while busy and not interrupts.any:
            for pipe in _ready(busy):
                if _take(pipe, busy, done):
                    _give(pipe, queue, found, busy)
        deadline = time.monotonic() + _PATIENCE
        while busy and time.monotonic() < deadline:
            for pipe in _ready(busy):
                _take(pipe, busy, done)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(_PATIENCE)
            worker.kill()
        for one in busy.values():
            done(one, FileReport(found[one].path, error="interrupted, it may be written or not: run this again"))


def _started(job: Job) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    # A forked worker would also copy the locks of this process's threads.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, job), daemon=True)
    with _held_interrupts():
        worker.start()
    # While this process holds the worker's side open, it would not notice that the worker has ended.
    theirs.close()
    return worker, ours


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Block interrupts here and in processes started here: from their first moment, only the parent handles them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # If the first worker started the resource tracker, that would unblock interrupts again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _give(pipe: Connection, queue: Iterator[int], found: Sequence[files.Found], busy: dict[Connection, int]) -> None:
    number = next(queue, None)
    if number is None:
        return
    busy[pipe] = number
    # A process that has ended is noticed when its report is received.
    with contextlib.suppress(OSError):
        pipe.send(found[number])


def _ready(busy: dict[Connection, int]) -> list[Connection]:
    ready = wait(list(busy), _GLANCE)
    return [pipe for pipe in busy if pipe in ready]


def _take(pipe: Connection, busy: dict[Connection, int], done: Callable[[int, FileReport], None]) -> bool:
    number = busy.pop(pipe)
    try:
        done(number, pipe.recv())
    except (EOFError, OSError):
        return False
    return True


def _work(pipe: Connection, job: Job) -> None:
    """Rewrite one file after another until the parent sends no more files or has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A tree has some 100,000 nodes, and none is garbage before its file is done. This saves a tenth of the time.
    gc.set_threshold(200_000)
    with contextlib.suppress(EOFError, OSError):
        while True:
            found = pipe.recv()
            # During the rewrite, SIGTERM raises an exception, so that a temporary file is removed.
            signal.signal(signal.SIGTERM, _leave)
            report = process(found, job)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            pipe.send(report)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
