"""The report that the command prints for a person."""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.cli import command, reporting
from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits import rewriting
from tfmp.migrate.edits.results import Finding, Level, Result

_SCRIPT = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
_UNKNOWN = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.Manager(8)\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _write(**texts: str) -> None:
    for name, text in texts.items():
        Path(f"{name}.py").write_text(text)


def _notes(script: Script) -> Iterator[Result]:
    del script
    yield Finding("R6", 1, Level.NOTE, "It is kept.")


def test_notes_are_marked_and_leave_nothing_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "RULES", (_notes,))
    _write(a=_SCRIPT)
    assert command.main(["a.py"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Good to know: 1 place\n\na.py:1: R6: It is kept.\n    | import tensorflow")
    assert shown.endswith("\nleft to you: nothing; 1 place good to know\n")
    assert command.main(["--check", "a.py"]) == 0


def _finds_three(script: Script) -> Iterator[Result]:
    yield Finding("R6", 1, Level.NOTE, "It runs.")
    yield Finding("R13", 2, Level.FAILS, "It is gone.")
    yield Finding("R10", 2, Level.WRONG, "It is counted twice.", f"It is named {script.text[:6]}.")


def test_what_hurts_most_comes_first_and_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "RULES", (_finds_three,))
    _write(a=_SCRIPT, b=_UNKNOWN, c="\0")
    assert command.main(["--todo", "."]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Trains wrongly without an error: 2 places",
        "",
        "R10: It is counted twice. (2 places)",
        "./a.py:2: R10: It is named import.",
        "    | manager = tf.contrib.mixed_precision.FixedLossScaleManager(8)",
        "./b.py:2: R10: It is named import.",
        "    | manager = tf.contrib.mixed_precision.Manager(8)",
        "",
        "Fails, or was not processed: 3 places",
        "",
        "./c.py: not done: it is binary, or in UTF-16: it has zero bytes.",
        "",
        "R13: It is gone. (2 places)",
        "./a.py:2: R13: manager = tf.contrib.mixed_precision.FixedLossScaleManager(8)",
        "./b.py:2: R13: manager = tf.contrib.mixed_precision.Manager(8)",
        "",
        "3 files: 0 to be rewritten, 2 unchanged, 1 not done",
        "left to you: 2 places of wrong training, 2 places of failure, 1 not done; 2 places good to know",
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("settings", "stream", "colours"),
    [
        ({}, _Terminal(), True),
        ({}, io.StringIO(), False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, _Terminal(), False),
        ({"TERM": "dumb"}, _Terminal(), False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, io.StringIO(), True),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="other terminals may not know the codes")
def test_colours_are_for_terminals(
    settings: dict[str, str], stream: io.StringIO, colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    style = reporting.style_for(stream)
    assert style.colours == colours
    assert (style.width == sys.maxsize) != stream.isatty()
    assert reporting.coloured_diff("+x\n y\n", style) == ("\x1b[32m+x\x1b[0m\n y\n" if colours else "+x\n y\n")


def test_long_lines_are_wrapped_and_letters_that_steer_a_terminal_are_left_out() -> None:
    _write(a=f"x = '\x1b[31m{'y' * 200}'\n")
    report = FileReport("a.py", findings=(Finding("R9", 1, Level.WRONG, "It is wrong " * 9),))
    shown = [*reporting.left_lines([report, report], Level, reporting.Style(colours=True, width=60))]
    assert shown[0] == "\x1b[1;31mTrains wrongly without an error: 2 places\x1b[0m"
    assert shown[2].startswith("\x1b[1;31mR9:\x1b[0m It is wrong It")
    assert shown[4] == "    (2 places)"
    assert shown[5].startswith("\x1b[1ma.py:1: R9:\x1b[0m x = ' [31myyy")
    assert len(shown[5]) == 60 + len("\x1b[1m\x1b[0m")
