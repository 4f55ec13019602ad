"""The scripts that the tests of the command rewrite."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
REWRITTEN = "import tensorflow.compat.v1 as tf\nimport tfmp\nmanager = tfmp.FixedLossScaleManager(8)\n"

#: A script with a line that is left to a human.
UNKNOWN = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.Manager(8)\n"

#: What a process needs to import tfmp.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def write(**texts: str) -> None:
    """Write Python files into the working directory, by their names without the suffix."""
    for name, text in texts.items():
        Path(f"{name}.py").write_text(text)


def ended(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; `python` stands for this interpreter."""
    words = [sys.executable if word == "python" else word for word in command]
    return subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
