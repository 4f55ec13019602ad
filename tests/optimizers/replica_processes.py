"""Runs `replica_training` as a program, in one process or as two workers on loopback, and ends it when it hangs."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import replica_training

import tfmp


class Finished(NamedTuple):
    """What became of the processes.

    Attributes:
        codes: What each returned; None for one that did not come to an end and was killed.
        logs: What each printed.
    """

    codes: list[int | None]
    logs: list[str]

    def states(self, way: str) -> list[list[Any]]:
        """Return for each process its states after every step.

        Args:
            way: "loop" or "fit".
        """
        prefix = f"STATE {way} "
        return [
            [json.loads(line.removeprefix(prefix)) for line in log.splitlines() if line.startswith(prefix)]
            for log in self.logs
        ]


def run(strategy: str, arguments: list[str], directory: Path, seconds: float) -> Finished:
    """Run the program, and kill what is left of it when it hangs or one process has failed.

    Args:
        strategy: "mirrored", which is one process; or "workers", which are two.
        arguments: The program's other arguments.
        directory: Where to write the logs.
        seconds: How long all may print nothing. What they take in all depends on the machine's load.
    """
    configs = _configs() if strategy == "workers" else [{}]
    logs = [directory / f"{strategy}_{rank}.log" for rank in range(len(configs))]
    package, *others = arguments
    command = [sys.executable, replica_training.__file__, package, strategy, *others]
    processes = [_start(command, config, log) for config, log in zip(configs, logs, strict=True)]
    try:
        codes = _wait(processes, logs, seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Finished(codes, [log.read_text(errors="replace") for log in logs])


def _configs() -> list[dict[str, str]]:
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("localhost", 0))
    cluster = {"worker": [f"localhost:{each.getsockname()[1]}" for each in sockets]}
    for each in sockets:
        each.close()
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})} for rank in range(2)
    ]


def _start(command: list[str], config: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    root = str(Path(tfmp.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "-1"} | config
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], seconds: float) -> list[int | None]:
    printed, since = 0, time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > since + seconds:
            return codes
        if (size := sum(log.stat().st_size for log in logs)) > printed:
            printed, since = size, time.monotonic()
        time.sleep(0.1)
