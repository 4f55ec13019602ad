"""Runs a separate program and checks that its user sees the reports, whatever is set up in this process."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfmp


@pytest.mark.parametrize("logging_setup", ["", "logging.warning('set up'); "], ids=["nothing", "root-at-warning"])
def test_program_that_set_no_level_sees_the_reports(logging_setup: str) -> None:
    root = Path(tfmp.__file__).parent.parent
    code = f"""
import logging, sys; {logging_setup}sys.path.insert(0, {str(root)!r})
import tensorflow as tf, tfmp
with tf.Graph().as_default():
    step = tf.constant(0)
    hook = tfmp.LossScaleLoggingHook(tfmp.FixedLossScaleManager(8))
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        session.run(step)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "loss scale 8, steps applied 0, skipped 0 (0 in a row)\n" in done.stderr
