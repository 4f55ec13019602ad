"""Runs a script of a checkout in a process of its own, and says why it failed."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]

# The last line of a traceback: it begins with the name of the exception's class, which ends in Error or Exception.
_ERROR = re.compile(r"(?:\w+\.)*(?P<error>\w*(Error|Exception)\b.*)")

#: The number of lines at the end of a failed process' log that are reported.
_LOG_LINES = 30


def run(
    command: Sequence[str],
    directory: Path,
    log: Path,
    import_path: Sequence[Path],
    timeout: float,
    variables: Mapping[str, str],
) -> str:
    """Run a command on the CPU, and return the reason why it failed; an empty string if it did not.

    Args:
        command: The program and its arguments.
        directory: The directory to run it in.
        log: The file that gets its output.
        import_path: The directories that it imports modules from, before the root of this repository.
        timeout: The seconds after which it is ended.
        variables: Further environment variables.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*import_path, _ROOT])),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **variables,
    }
    with log.open("w") as output:
        try:
            status = subprocess.run(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"it took more than {timeout:g} s"
    return "" if status == 0 else _last_error(log.read_text(errors="replace")) or f"exit status {status}"


def last_lines(log: Path) -> str:
    """Return the lines at the end of a process' output.

    Args:
        log: The file with the output.
    """
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _last_error(log: str) -> str:
    """Return the line of a traceback that names the error."""
    named = [found for line in log.splitlines() if (found := _ERROR.match(line))]
    return named[-1]["error"].strip() if named else ""
