"""Runs Python in a process of its own, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def run(*arguments: str, directory: Path = _ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, in a directory, with variables of its environment besides; fail after four minutes."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(_ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
