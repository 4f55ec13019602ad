"""Runs an example as its users run it: as a program, in a separate process."""

import os
import pathlib
import subprocess
import sys

_REPOSITORY = pathlib.Path(__file__).parents[2]


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module of `estimator_examples`, with variables of its environment besides; fail after four minutes."""
    return subprocess.run(
        [sys.executable, "-m", f"estimator_examples.{module}", *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
