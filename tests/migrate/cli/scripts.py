"""The scripts that the tests of the command rewrite, rules that stand for all, and what a run of the command says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Result
from tfmp.migrate.rules import Rule

SCRIPT = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
REWRITTEN = "import tensorflow.compat.v1 as tf\nimport tfmp\nmanager = tfmp.FixedLossScaleManager(8)\n"

#: A script with a line that is left to a human.
UNKNOWN = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.Manager(8)\n"


class Ran(NamedTuple):
    """The exit status of a command, and what it has written."""

    status: int
    out: str
    err: str

    def findings(self) -> list[tuple[str, int, str, str]]:
        """Return the path, line, level and message, with its detail, of each finding in a report as JSON."""
        found = [(file["path"], one) for file in json.loads(self.out)["files"] for one in file["findings"]]
        return [(path, one["line"], one["level"], f"{one['message']} {one['detail']}") for path, one in found]


#: Runs the command with these arguments.
Run = Callable[..., Ran]


def write(files: Mapping[str, str | bytes] | None = None, **texts: str) -> None:
    """Write files into the working directory: by their paths, or Python files by their names without the suffix."""
    for name, content in {**(files or {}), **{f"{stem}.py": text for stem, text in texts.items()}}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def rule_of(*results: Result) -> Rule:
    """Return a rule that finds the same in every script."""

    def rule(script: Script) -> Iterator[Result]:
        del script
        yield from results

    return rule


def started(*command: str) -> "subprocess.Popen[str]":
    """Start a command in a process group of its own; `python` stands for this interpreter, which can import tfmp."""
    words = [sys.executable if word == "python" else word for word in command]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def ended(process: "subprocess.Popen[str]", seconds: float = 60) -> Ran:
    """Wait for a process to end."""
    out, err = process.communicate(timeout=seconds)
    return Ran(process.returncode, out, err)
