"""Processes many files, in several processes if that is worth their start."""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait

from tfmp.migrate.cli import files
from tfmp.migrate.cli.processing import FileReport, Job, process

# A process takes about half a second to start, which is also the time for a dozen files.
_FILES_PER_PROCESS = 24
# Windows cannot wait for more.
_MOST_PROCESSES = 61
# Seconds between two looks at what is finished. Windows notices an interrupt only between them.
_GLANCE = 0.2
_DEEP_STACK = 64 * 2**20


def process_all(
    tasks: Mapping[int, tuple[files.Found, Job]], progress: Callable[[], object] = lambda: None
) -> tuple[dict[int, FileReport], bool]:
    """Process files, each with its job; return the reports by number, and whether an interrupt (Ctrl-C) ended the run.

    After an interrupt no further file is begun, and those that were begun are finished. A second interrupt ends them.
    `progress` is called after each finished file.
    """
    reports: dict[int, FileReport] = {}
    processes = min(_cores(), _MOST_PROCESSES, len(tasks) // _FILES_PER_PROCESS)
    interrupted = False
    if processes > 1:
        # A forked process would also copy the locks of this one.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare)
        interrupted = _process_in(pool, tasks, reports, progress)
    if not interrupted and len(reports) < len(tasks):
        # The files are few, or their process was killed. An interrupt does not end this thread.
        size = threading.stack_size(_DEEP_STACK)
        interrupted = _process_in(ThreadPoolExecutor(1), tasks, reports, progress)
        threading.stack_size(size)
    return dict(sorted(reports.items())), interrupted


def _process_in(
    pool: Executor,
    tasks: Mapping[int, tuple[files.Found, Job]],
    reports: dict[int, FileReport],
    progress: Callable[[], object],
) -> bool:
    """Add the reports that are missing; return True if an interrupt came. A file whose process is killed gets none."""
    futures: dict[Future[FileReport], int] = {}
    interrupted = False
    try:
        # Processes start with what is blocked here: only this one, the parent, handles interrupts.
        with files.held(signal.SIGINT):
            for number in sorted(tasks.keys() - reports.keys()):
                futures[pool.submit(process, *tasks[number])] = number
        unfinished = {*futures}
        while unfinished:
            finished, unfinished = wait(unfinished, _GLANCE)
            for future in finished:
                future.result()
                progress()
    except (BrokenExecutor, OSError):
        pass  # a process was killed, or the system refuses another one
    except KeyboardInterrupt:
        interrupted = True
    try:
        for future in futures:
            future.cancel()
        pool.shutdown()
    except KeyboardInterrupt:
        interrupted = True
        for process_of_pool in multiprocessing.active_children():
            process_of_pool.terminate()
    for future, number in futures.items():
        if not future.done():
            error = "it was interrupted, and may be written or not: run this again"
            reports[number] = FileReport(tasks[number][0].path, error=error)
        elif not future.cancelled() and not isinstance(future.exception(), BrokenExecutor):
            reports[number] = future.result()
    return interrupted


def _prepare() -> None:
    # The parent handles what a terminal sends to all processes, and lets these finish their files.
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # A tree has some 100,000 nodes, and none is garbage before its file is done. This saves a tenth of the time.
    gc.set_threshold(200_000)
    with files.held(signal.SIGTERM):  # the thread that writes files decides when
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
