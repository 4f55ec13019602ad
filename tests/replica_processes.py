"""Runs a program as several processes on this machine, and ends processes that hang."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tfmp

#: The seconds that the processes of one run may take in total, less than pytest's timeout for a test.
_SECONDS_IN_ALL = 270

#: The seconds that a terminated process has to end. Within them horovodrun ends the processes that it has started.
_SECONDS_TO_END = 20


class Finished(NamedTuple):
    """The results of the processes of one run, one of each process."""

    codes: list[int | None]  #: None for a process that did not end by itself.
    logs: list[str]

    def states(self, way: str) -> list[list[Any]]:
        """Return, for each process, the states that it printed as `STATE <way> <JSON>`."""
        return [[json.loads(state) for state in re.findall(rf"STATE {way} (.*)", log)] for log in self.logs]

    def __str__(self) -> str:
        """Return the codes and the logs, as text for the message of a failing test."""
        parts = zip(self.codes, self.logs, strict=True)
        return "\n".join(f"--- process {index} returned {code}:\n{log}" for index, (code, log) in enumerate(parts))


def run(
    command: Sequence[str],
    directory: Path,
    seconds: float,
    environments: Sequence[Mapping[str, str]] = ({},),
    *,
    outlive: bool = False,
) -> Finished:
    """Start a command once for each environment, and wait for the processes; their logs are in the directory.

    Those that are left are ended if no process prints anything for so many seconds (the total time depends on the
    machine's load), or if one fails, unless the others shall outlive it.
    """
    mark = {"TFMP_TEST_RUN": uuid.uuid4().hex}
    logs = [directory / f"process_{index}.log" for index in range(len(environments))]
    processes = [_start(command, {**own, **mark}, log) for own, log in zip(environments, logs, strict=True)]
    try:
        codes = _wait(processes, logs, seconds, outlive)
    finally:
        _end(processes, mark)
    return Finished(codes, [log.read_text(errors="replace") for log in logs])


def free_addresses(count: int) -> list[str]:
    """Return addresses on this machine that no process listens at."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [f"localhost:{each.getsockname()[1]}" for each in sockets]


def two_workers() -> list[dict[str, str]]:
    """Return the environments that make two processes the two workers of a TensorFlow cluster."""
    cluster = {"worker": free_addresses(2)}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})} for rank in range(2)
    ]


def under_horovod(program: Sequence[str], processes: int = 2) -> list[str]:
    """Return the command that runs a program under Horovod, with the given number of processes."""
    return [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(processes), *program]


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    root = Path(tfmp.__file__).parent.parent
    path = os.pathsep.join(str(root / each) for each in ("", "tests", "tests/contract"))
    whole = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"} | environment
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=whole)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], seconds: float, outlive: bool
) -> list[int | None]:
    started = since = time.monotonic()
    printed = 0
    while True:
        codes = [process.poll() for process in processes]
        failed = any(codes) and not outlive
        if None not in codes or failed or time.monotonic() > min(since + seconds, started + _SECONDS_IN_ALL):
            return codes
        if (size := sum(log.stat().st_size for log in logs)) > printed:
            printed, since = size, time.monotonic()
        time.sleep(0.1)


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: Mapping[str, str]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _SECONDS_TO_END
    while time.monotonic() < deadline and None in [process.poll() for process in processes]:
        time.sleep(0.1)
    [(name, value)] = mark.items()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{name}={value}".encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)
        except (PermissionError, ProcessLookupError, FileNotFoundError):
            continue  # the process belongs to another user, or has ended
    for process in processes:
        process.wait()
