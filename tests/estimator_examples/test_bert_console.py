"""Tests of the lines and the progress bar that share a terminal."""

import contextlib
import dataclasses
import io
import logging
import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import terminals

from estimator_examples.bert import console
from estimator_examples.bert.history import Step
from estimator_examples.bert.progress import Progress

LOGGER = logging.getLogger("tests.bert.console")
STEP = Step(
    attempt=1,
    global_step=0,
    mlm_loss=7.5,
    nsp_loss=0.7,
    learning_rate=0.1,
    loss_scale=2.0**32,
    applied=False,
    consecutive_skips=1,
)
OVERFLOW = "overflow in " + "; ".join(f"bert/layer_{i}/feed_forward/intermediate/kernel:0: 65536 nan" for i in range(4))


def _train_for_show() -> None:
    progress = Progress(first_step=0, last_step=1200, batch_size=32, every=1, loss_scale=2.0**32)
    with contextlib.closing(progress), console.logs_as_lines(LOGGER):
        progress.show(STEP)
        LOGGER.warning(OVERFLOW)
        progress.show(dataclasses.replace(STEP, attempt=1000, loss_scale=2.0**31))
        progress.show(dataclasses.replace(STEP, attempt=1001, global_step=1200, loss_scale=2.0**31, applied=True))


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_and_bar_do_not_overwrite_each_other_on_a_terminal(columns: int) -> None:
    with (
        terminals.terminal(columns) as terminal,
        contextlib.redirect_stdout(terminal.stdout),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        _train_for_show()
    assert errors.getvalue() == ""
    *lines, bar, last = terminal.rows()
    assert terminal.broken == []
    text = "\n".join(lines)
    assert re.sub(r"\n  ", " ", text) == (
        f"{OVERFLOW}\n"
        "attempt 1000: loss scale 4294967296 -> 2147483648 (gradients overflowed, 2 skipped)\n"
        "step 1200/1200: MLM loss 7.500, NSP loss 0.700, loss scale 2147483648, skipped 2"
    )
    assert re.fullmatch(r"  0%\|.*\| 1/1200 steps, \S+ left, loss scale 2147483648, skipped 2", bar)
    assert last == ""


def test_a_file_gets_unwrapped_lines_and_no_bar() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _train_for_show()
    overflow, scale, losses = printed.getvalue().splitlines()
    assert overflow == OVERFLOW
    assert scale.startswith("attempt 1000: loss scale 4294967296 -> 2147483648")
    assert re.search(r"loss scale 2147483648, skipped 2, \d+ examples/s$", losses)


def test_loggers_get_their_handlers_back() -> None:
    handler = logging.NullHandler()
    LOGGER.addHandler(handler)
    with contextlib.suppress(KeyError), console.logs_as_lines(LOGGER):
        raise KeyError
    assert LOGGER.handlers == [handler]
    LOGGER.removeHandler(handler)
