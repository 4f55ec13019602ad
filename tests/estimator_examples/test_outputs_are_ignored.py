"""Tests that git ignores the files that the examples' commands write."""

import pathlib
import shutil
import subprocess

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.mark.skipif(
    shutil.which("git") is None or not (REPOSITORY / ".git").exists(), reason="this is no clone, or git is missing"
)
def test_git_ignores_the_directories_of_the_examples_and_not_their_code() -> None:
    # A newer tox writes a file named .venv if there is no directory of that name.
    outputs = [
        *("bert_model/history.csv", "bert_horovod/data", "bert_tf_config/data"),
        *("digits_gan/float16.png", "digits_ranges/ranges_after.png", "gpu_report/report.md", ".venv"),
    ]
    code = ["estimator_examples/digits_gan/new.py"]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *outputs, *code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == outputs, done.stderr
