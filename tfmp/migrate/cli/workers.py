"""Rewrites files, many at a time if they are many."""

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

# A process takes some tenths of a second to start, which a few dozen files take too.
_FILES_WORTH_PROCESSES = 48
# How soon an interrupt is seen, and for how long the files that are being worked on are waited for then.
_GLANCE = 0.1
_PATIENCE = 2.0


class Outcome(NamedTuple):
    """What became of files.

    Attributes:
        reports: What became of each, in the order of the files; of those that were looked at, if it was interrupted.
        interrupted: Whether an interrupt ended it.
    """

    reports: list[FileReport]
    interrupted: bool


def process_all(found: Sequence[files.Found], job: Job, progress: Callable[[], object] = lambda: None) -> Outcome:
    """Rewrite files; where they are many, in as many processes as there are cores.

    An interrupt (Ctrl-C) lets the files be finished that are being worked on, for some seconds, and no other be
    started; a second one ends these too.

    Args:
        found: The files.
        job: What to do to each.
        progress: Called after each file.

    Returns:
        What became of the files.

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
                # There may be no room for another process.
                with contextlib.suppress(OSError):
                    _in_processes(processes, found, job, done, interrupts)
            # All, if they are few; else what processes had that were ended from outside.
            for number, one in enumerate(found):
                if number not in reports and not interrupts.any:
                    done(number, process(one, job))
        except KeyboardInterrupt:
            interrupts.any = True
    return Outcome([reports[number] for number in sorted(reports)], interrupts.any)


class _Interrupts:
    """Notes the first interrupt, which is no exception then: that would come between a file and its report."""

    def __init__(self) -> None:
        self.any = False
        self._before: Any = None  # a handler is a function, a number, or an enumeration's member

    def __enter__(self) -> "_Interrupts":
        # Only the main thread may; and whoever has interrupts ignored, as nohup does, wants them ignored.
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
    """Work in processes; a file whose process is ended from outside is left without a report."""
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
    # Workers that are copies of this process would copy its threads' locks too.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, job), daemon=True)
    with _held_interrupts():
        worker.start()
    # Else a worker's end would not be seen: this process would hold its side open.
    theirs.close()
    return worker, ours


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Hold interrupts back, in what is started too: they are for the parent to answer, from the first moment."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # It would let them through again if the first worker started it.
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
    # A process that is gone is found out when its report is taken.
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
    """Rewrite one file after another, until the parent has no more or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Trees of some hundred thousand nodes, none of which is garbage before the file is done: a tenth of the time.
    gc.set_threshold(200_000)
    with contextlib.suppress(EOFError, OSError):
        while True:
            found = pipe.recv()
            # An exception lets a temporary file be removed. Elsewhere there is nothing to clear away.
            signal.signal(signal.SIGTERM, _leave)
            report = process(found, job)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            pipe.send(report)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
