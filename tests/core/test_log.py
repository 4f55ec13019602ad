"""Runs a separate program and checks that its user sees the reports, whatever is set up in this process."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfmp


@pytest.mark.parametrize("setup", ["", "logging.warning('set up'); "], ids=["nothing", "root-at-warning"])
def test_program_that_set_no_level_sees_the_reports(setup: str) -> None:
    code = f"import logging; {setup}from tfmp.core.log import visible_logger; visible_logger().info('a report')"
    root = Path(tfmp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "a report\n" in done.stderr
