"""The reports of the command: for a person, as JSON, and as a patch."""

import codecs
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.migrate.cli.scripts import REWRITTEN, SCRIPT, UNKNOWN, write
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.cli import command, reporting
from tfmp.migrate.cli.json_report import file_totals, rule_totals
from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits import rewriting
from tfmp.migrate.edits.results import Finding, Level, Result
from tfmp.migrate.edits.rewriting import Change


def _notes(script: Script) -> Iterator[Result]:
    del script
    yield Finding("R6", 1, Level.NOTE, "It is kept.")


def test_notes_are_marked_and_leave_nothing_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "RULES", (_notes,))
    write(a=SCRIPT)
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
    write(a=SCRIPT, b=UNKNOWN, c="\0")
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
    write(a=f"x = '\x1b[31m{'y' * 200}'\n")
    report = FileReport("a.py", findings=(Finding("R9", 1, Level.WRONG, "It is wrong " * 9),))
    shown = [*reporting.left_lines([report, report], Level, reporting.Style(colours=True, width=60))]
    assert shown[0] == "\x1b[1;31mTrains wrongly without an error: 2 places\x1b[0m"
    assert shown[2].startswith("\x1b[1;31mR9:\x1b[0m It is wrong It")
    assert shown[4] == "    (2 places)"
    assert shown[5].startswith("\x1b[1ma.py:1: R9:\x1b[0m x = ' [31myyy")
    assert len(shown[5]) == 60 + len("\x1b[1m\x1b[0m")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    write(a=SCRIPT, b=UNKNOWN, c="import tensorflow\nprint 'x'\n")
    assert command.main(["--json", "a.py", "b.py", "c.py"]) == 1
    document = json.loads(capsys.readouterr().out)
    first, second, third = document["files"]
    name = "FixedLossScaleManager"
    edits = [
        {"rule": "R2", "line": 2, "before": "", "after": "import tfmp\n"},
        {"rule": "R2", "line": 2, "before": f"tf.contrib.mixed_precision.{name}", "after": f"tfmp.{name}"},
    ]
    assert first == {
        "path": "a.py",
        "changed": True,
        "edits": edits,
        "findings": [],
        "error": None,
        "error_line": None,
    }
    assert [(one["rule"], one["line"], one["level"]) for one in second["findings"]] == [("R2", 2, "fails")]
    assert third["error"].endswith("If it is Python 2, run 2to3 or futurize first")
    assert third["error_line"] == 2
    assert document["summary"] == {
        "files": 3,
        "changed": 1,
        "unchanged": 1,
        "not_done": 1,
        "written": False,
        "rules": {"R2": {"files": 2, "lines": 2, "wrong": 0, "fails": 1, "note": 0}},
    }


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_json_has_names_that_are_not_utf_8(capsys: pytest.CaptureFixture[str]) -> None:
    Path(os.fsdecode(b"\xff.py")).write_text("x = 1\n")
    assert command.main(["--json", "."]) == 0
    (report,) = json.loads(capsys.readouterr().out)["files"]
    assert report["path"] == "./\\xff.py"


def test_edits_of_one_line_count_once_and_rules_are_in_order() -> None:
    changes = (
        Change("R2", 3, "a", "b", 3),
        Change("R2", 3, "c", "d", 3),
        Change("R2", 4, "", "import tfmp\n", 4),
        Change("R2", 5, "two\nlines", "", 6),
    )
    reports = [
        FileReport("a.py", changes, (Finding("R10", 1, Level.WRONG, "It is wrong."),)),
        FileReport("b.py", error="it is read-only"),
    ]
    assert [*rule_totals(reports).items()] == [
        ("R2", {"files": 1, "lines": 4, "wrong": 0, "fails": 0, "note": 0}),
        ("R10", {"files": 1, "lines": 0, "wrong": 1, "fails": 0, "note": 0}),
    ]
    assert file_totals(reports) == {"files": 2, "changed": 1, "unchanged": 0, "not_done": 1}


@pytest.mark.parametrize("program", [["git", "apply", "-p0"], ["patch", "-s", "-p0", "-i"]])
def test_diff_alone_is_a_patch(program: list[str], capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def variants(script: str) -> dict[str, bytes]:
        return {
            "ends.py": (script.replace("\n", "\r\n") + "x = '\u00e9'").encode(),
            "mark.py": codecs.BOM_UTF8 + script.encode(),
            "old.py": ("# coding: latin-1\n" + script + "x = '\u00e9'\n").encode("latin-1"),
            "with a space.py": script.encode(),
            "in/gbk.py": "# coding: gbk\n# \u6df7\u5408\n".encode("gbk") + script.encode(),
        }

    Path("in").mkdir()
    for name, content in variants(SCRIPT).items():
        Path(name).write_bytes(content)
    assert command.main(["--diff", "."]) == 0
    shown = capsysbinary.readouterr()
    Path("a.patch").write_bytes(shown.out)
    assert shown.err.startswith(b"5 files: 5 to be rewritten, 0 unchanged, 0 not done\n")
    subprocess.run([*program, "a.patch"], check=True)
    assert {name: Path(name).read_bytes() for name in variants("")} == variants(REWRITTEN)
