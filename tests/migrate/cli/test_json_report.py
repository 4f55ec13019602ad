"""The report that the command prints as JSON."""

import json
import os
import sys
from pathlib import Path

import pytest

from tfmp.migrate.cli import command
from tfmp.migrate.cli.json_report import file_totals, rule_totals
from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits.results import Finding, Level
from tfmp.migrate.edits.rewriting import Change

_SCRIPT = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
_UNKNOWN = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.Manager(8)\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _write(**texts: str) -> None:
    for name, text in texts.items():
        Path(f"{name}.py").write_text(text)


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    _write(a=_SCRIPT, b=_UNKNOWN, c="import tensorflow\nprint 'x'\n")
    assert command.main(["--json", "a.py", "b.py", "c.py"]) == 1
    document = json.loads(capsys.readouterr().out)
    first, second, third = document["files"]
    name = "FixedLossScaleManager"
    assert first == {
        "path": "a.py",
        "changed": True,
        "edits": [
            {"rule": "R2", "line": 2, "before": "", "after": "import tfmp\n"},
            {"rule": "R2", "line": 2, "before": f"tf.contrib.mixed_precision.{name}", "after": f"tfmp.{name}"},
        ],
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
