"""Runs a part in a process of its own, and shows that it goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tools.gpu_report.parts import Part

_ROOT = Path(__file__).parents[2]

#: What the processes have in their environment, unless the user has set something else.
ENVIRONMENT = {
    # Several processes share a GPU: those of the tests, and those of benchmarks.memory.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "MPLBACKEND": "Agg",
    "PYTHONUNBUFFERED": "1",
}

#: The exit status of a part that took too long: that of the command `timeout`.
TOO_LONG = 124

_SECONDS_BETWEEN_LINES = 30.0
_SHOWN_OF_LINE = 90


class Outcome(NamedTuple):
    """What became of a part.

    Attributes:
        part: The part.
        status: The exit status; None if the part was not run to its end.
        seconds: The seconds that it took.
        why_not: Why it was skipped or stopped; empty if it ended by itself.
    """

    part: Part
    status: int | None
    seconds: float = 0.0
    why_not: str = ""

    @property
    def result(self) -> str:
        """The outcome in a word, with the reason of what did not run."""
        if self.why_not:
            return self.why_not
        return "passed" if self.status == 0 else "failed"


def run(part: Part, folder: Path, limit: float) -> Outcome:
    """Run a part, and print a line every half minute.

    Args:
        part: The part.
        folder: The folder of the report, in which it leaves its files.
        limit: The seconds after which it is stopped.
    """
    started = time.monotonic()
    log = log_of(part, folder)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments_in(folder)],
            cwd=_ROOT,
            env={**ENVIRONMENT, **part.environment, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Then its processes are a group, which can be ended together.
            start_new_session=True,
        )
        try:
            status = _waited(process, log, started, limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - started
    if status is None:
        return Outcome(part, TOO_LONG, seconds, f"stopped after {duration(seconds)}")
    # A process that a signal ended has a negative status; shells add the signal to 128.
    return Outcome(part, status if status >= 0 else 128 - status, seconds)


def log_of(part: Part, folder: Path) -> Path:
    """Return the file with the output of a part.

    Args:
        part: The part.
        folder: The folder of the report.
    """
    return folder / f"{part.name}.log"


def _waited(process: "subprocess.Popen[bytes]", log: Path, started: float, limit: float) -> int | None:
    """Return the exit status, or None if the process takes too long."""
    while (left := started + limit - time.monotonic()) > 0:
        try:
            return process.wait(timeout=min(left, _SECONDS_BETWEEN_LINES))
        except subprocess.TimeoutExpired:
            last = (lines(log) or ["no output yet"])[-1].strip()
            print(f"      {duration(time.monotonic() - started):>12}: {last[:_SHOWN_OF_LINE]}", flush=True)
    return None


def lines(log: Path) -> list[str]:
    """Return the lines of an output that a reader wants to see, as a terminal would show them.

    What TensorFlow logs for information is left out, and so are blank lines at the end.

    Args:
        log: The file with the output.
    """
    text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", log.read_bytes().decode("utf-8", errors="replace"))
    # What stands before a carriage return is overwritten, as a progress bar is.
    shown = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    kept = [line for line in shown if not _OF_TENSORFLOW.match(line)]
    while kept and not kept[-1]:
        del kept[-1]
    return kept


_OF_TENSORFLOW = re.compile(
    r"I\d{4} \d\d:\d\d|\d{4}-\d\d-\d\d [\d:.]+: I |WARNING: All log messages before absl::InitializeLog"
    r"|To enable the following instructions:"
)


def duration(seconds: float) -> str:
    """Return a duration as text.

    Examples:
        >>> duration(7.4), duration(150)
        ('7 s', '2 min 30 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
