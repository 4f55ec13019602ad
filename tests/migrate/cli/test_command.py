"""The whole command: its options, its exit status, and its reports for a person, as JSON and as a patch."""

import codecs
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.migrate.cli.scripts import REWRITTEN, SCRIPT, UNKNOWN, Run, ended, rule_of, started, write
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.cli import command, reporting
from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits import rewriting
from tfmp.migrate.edits.results import Edit, Finding, Level, Result
from tfmp.migrate.rules import Rule

_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "commands.md"
_CANNOT_PARSE = f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot parse it"
_ADVICE = "If it is Python 2, run 2to3 or futurize first."
_PYTHON_2 = "import tensorflow\nprint 'x'\n"
_CONTRIB = "tf.contrib.mixed_precision"


def test_page_has_the_help_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["__main__.py"])
    with pytest.raises(SystemExit):
        command.main(["--help"])
    help_text = capsys.readouterr().out
    assert help_text.startswith("usage: python -m tfmp.migrate")
    assert help_text in _PAGE.read_text()


def test_by_default_it_shows_and_writes_nothing(run: Run) -> None:
    write(a=SCRIPT)
    removed, added = SCRIPT.splitlines()[1], REWRITTEN.splitlines()[1:]
    shown = (
        "--- a.py\n+++ a.py\n@@ -1,2 +1,3 @@\n import tensorflow.compat.v1 as tf\n"
        f"-{removed}\n+{added[0]}\n+{added[1]}\n\n"
        "1 file: 1 to be rewritten, 0 unchanged, 0 not done\n"
        "lines to be rewritten, by rule: R2 2\n"
        "left to you: nothing\n"
        "--write makes these rewrites; --todo lists what is left without the diff and the notes.\n"
    )
    assert run("a.py")[:2] == (0, shown)
    assert Path("a.py").read_text() == SCRIPT


def test_write_edits_and_gives_the_lines_of_the_written_file(run: Run) -> None:
    left = UNKNOWN.splitlines()[1]
    write(a=f"{SCRIPT}{left}\n")
    ran = run("--write", "a.py")
    assert ran.status == 1
    assert Path("a.py").read_text() == f"{REWRITTEN}{left}\n"
    lines = ran.out.splitlines()
    assert lines[2].startswith("a.py:4: R2: ")
    assert lines[3:] == [
        f"    | {left}",
        "",
        "a.py: rewritten by R2",
        "1 file: 1 rewritten, 0 unchanged, 0 not done",
        "lines rewritten, by rule: R2 2",
        "left to you: 1 place of failure",
    ]


def test_a_second_run_changes_nothing(run: Run) -> None:
    write(a=SCRIPT)
    assert run("--write", ".").status == 0
    written = Path("a.py").stat()
    ran = run("--write", ".")
    found = Path("a.py").stat()
    # The time of the last access may be another one.
    assert (found.st_ino, found.st_mtime_ns, found.st_size) == (written.st_ino, written.st_mtime_ns, written.st_size)
    assert ran[:2] == (0, "1 file: 0 rewritten, 1 unchanged, 0 not done\nleft to you: nothing\n")


@pytest.mark.parametrize(("text", "status"), [(SCRIPT, 1), (REWRITTEN, 0), (UNKNOWN, 1), (_PYTHON_2, 1)])
def test_check_sets_the_exit_status_only(text: str, status: int, run: Run) -> None:
    write(a=text)
    ran = run("--check", "a.py")
    assert (ran.status, ran.out, ran.err[:8]) == (status, "", "1 file: ")
    assert Path("a.py").read_text() == text


def test_what_is_not_python_3_and_does_not_concern_tensorflow_is_nobodys_task(run: Run) -> None:
    write(a="print 'x'\n", b="def f(:\n", c="import time\nprint 'x', time.clock()\n")
    assert run(".").status == 0


_TABS = "Make spaces of the tabs at the starts of its lines, for example by `expand --initial`."
_MIX = "LibCST, which edits it, cannot parse its mix of tabs and spaces, which begins here"
_MIXED = (
    'import tensorflow as tf\n\n\ndef f(a):\n        """A.\n\n\tB.\n        """\n        if a:\n            a = 1\n'
)
_PRINT = "Missing parentheses in call to 'print'. Did you mean print(...)?"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x\0", ": not done: it is binary, or in UTF-16: it has zero bytes.\n"),
        (_PYTHON_2, f":2: not done: {_CANNOT_PARSE} ({_PRINT}). {_ADVICE}\n"),
        ("import tensorflow\ndef f(:\n", f":2: not done: {_CANNOT_PARSE} (invalid syntax). {_ADVICE}\n"),
        ("import tensorflow as tf\n(name): int\n", "cannot parse this line, though Python can.\n    | (name): int\n"),
        (f"{_MIXED}        elif not a:\n\t        a = 2\n", f":12: not done: {_MIX}. {_TABS}\n    | a = 2\n"),
        ("import tensorflow as tf\nif tf:\n\tx = 1\n        y = 2\n", f"in indentation). {_TABS}\n    | y = 2\n"),
    ],
)
def test_what_cannot_be_done_is_named_once_the_rest_is_done(text: str, said: str, run: Run) -> None:
    Path("empty").mkdir()
    write(a=SCRIPT, b=text, e=SCRIPT)
    ran = run("--write", ".", "empty", "missing")
    assert ran.status == 1
    assert [Path(f"{name}.py").read_text() for name in "abe"] == [REWRITTEN, text, REWRITTEN]
    assert "\n./b.py:" in ran.out
    assert said in ran.out
    hidden = "(hidden ones and those in __pycache__, build, node_modules, site-packages do not count)"
    assert f"\nempty: not done: it has no Python file {hidden}.\n" in ran.out
    assert "\nmissing: not done: it does not exist.\n" in ran.out


@pytest.mark.parametrize(
    "arguments", [[], [""], ["--unknown", "a.py"], ["--write", "--check", "a.py"], ["--json", "--diff", "a.py"]]
)
def test_wrong_usage_ends_with_status_2_and_calls_the_program_as_it_was_typed(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(a=SCRIPT)
    for typed, program in (("__main__.py", "python -m tfmp.migrate"), ("/usr/bin/tfmp-migrate", "tfmp-migrate")):
        monkeypatch.setattr(sys, "argv", [typed])
        with pytest.raises(SystemExit, match=r"^2$"):
            command.main(arguments)
        assert capsys.readouterr().err.startswith(f"usage: {program} ")
    assert Path("a.py").read_text() == SCRIPT


def _fails(script: Script) -> Iterator[Result]:
    raise KeyError(script.text[:6])


_FIRST_WORD = rule_of(Edit("R1", 0, 6, "from"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        pytest.param(
            (_FIRST_WORD, rule_of(Edit("R3", 0, 17, "import that"))),
            "rules R1 and R3 would both change 'import tensorflow'",
            id="two edits",
        ),
        pytest.param((_FIRST_WORD,), "it would not be Python after the rewrite", id="no Python"),
        pytest.param((_fails,), "KeyError: 'import'", id="error"),
    ],
)
def test_a_defect_of_ours_costs_one_file_and_is_owned(
    rules: tuple[Rule, ...], message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "RULES", rules)
    write(a=SCRIPT, b="x = 1\n")
    status, shown, _ = run("--write", ".")
    assert status == 1
    assert f"./a.py: not done: {message}: this is a defect of tfmp, report it.\n" in shown
    assert shown.endswith("2 files: 0 rewritten, 1 unchanged, 1 not done\nleft to you: 1 not done\n")
    assert Path("a.py").read_text() == SCRIPT


_DISK_IS_FULL = "the report cannot be printed: No space left on device. Files that were written stay so."


@pytest.mark.parametrize(
    ("closing", "message", "text"),
    [
        pytest.param(">&-", "standard output is closed: nothing was done.", SCRIPT, id="closed"),
        pytest.param(">/dev/full", _DISK_IS_FULL, REWRITTEN, id="full"),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_fails_is_said_in_a_sentence(closing: str, message: str, text: str) -> None:
    write(a=SCRIPT)
    ran = ended(started("sh", "-c", f'"$0" -m tfmp.migrate --write a.py {closing}', sys.executable))
    assert (ran.status, ran.err) == (1, f"python -m tfmp.migrate: {message}\n")
    assert Path("a.py").read_text() == text


@pytest.mark.parametrize("package", ["tqdm", "rich"])
def test_progress_is_for_terminals_and_needs_tqdm(package: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    write(**{f"f{number:02}": "x = 1\n" for number in range(20)})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, shown, error = run(".")
    assert (status, shown) == (0, "20 files: 0 to be rewritten, 20 unchanged, 0 not done\nleft to you: nothing\n")
    assert ("20" in error) == (package != "tqdm")


_WITHOUT_LIBCST = (
    "python -m tfmp.migrate: tfmp needs the package 'libcst' here, which is not installed: install tfmp with its "
    "extra, 'tfmp[migrate]'.\n"
)


@pytest.mark.parametrize(("package", "status", "error"), [("tensorflow", 0, ""), ("libcst", 2, _WITHOUT_LIBCST)])
def test_it_needs_libcst_and_no_tensorflow(package: str, status: int, error: str) -> None:
    write(a=SCRIPT)
    without = f"import runpy, sys; sys.modules[{package!r}] = None; "
    program = "runpy.run_module('tfmp.migrate', run_name='__main__', alter_sys=True)"
    ran = ended(started("python", "-c", without + program, "--write", "a.py"))
    assert (ran.status, ran.err) == (status, error)
    assert Path("a.py").read_text() == (SCRIPT if error else REWRITTEN)


def test_notes_are_marked_and_leave_nothing_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "RULES", (rule_of(Finding("R6", 1, Level.NOTE, "It is kept.")),))
    write(a=SCRIPT)
    status, shown, _ = run("a.py")
    assert status == run("--check", "a.py").status == 0
    assert shown.startswith("Good to know: 1 place\n\na.py:1: R6: It is kept.\n    | import tensorflow")
    assert shown.endswith("\nleft to you: nothing; 1 place good to know\n")


def test_what_hurts_most_comes_first_and_is_said_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of(
        Finding("R6", 1, Level.NOTE, "It runs."),
        Finding("R13", 2, Level.FAILS, "It is gone."),
        Finding("R10", 2, Level.WRONG, "It is counted twice.", "It is named import."),
    )
    monkeypatch.setattr(rewriting, "RULES", (rule,))
    write(a=SCRIPT, b=UNKNOWN, c="\0")
    ran = run("--todo", ".")
    assert ran.status == 1
    assert ran.out.splitlines() == [
        "Trains wrongly without an error: 2 places",
        "",
        "R10: It is counted twice. (2 places)",
        "./a.py:2: R10: It is named import.",
        f"    | manager = {_CONTRIB}.FixedLossScaleManager(8)",
        "./b.py:2: R10: It is named import.",
        f"    | manager = {_CONTRIB}.Manager(8)",
        "",
        "Fails, or was not processed: 3 places",
        "",
        "./c.py: not done: it is binary, or in UTF-16: it has zero bytes.",
        "",
        "R13: It is gone. (2 places)",
        f"./a.py:2: R13: manager = {_CONTRIB}.FixedLossScaleManager(8)",
        f"./b.py:2: R13: manager = {_CONTRIB}.Manager(8)",
        "",
        "3 files: 0 to be rewritten, 2 unchanged, 1 not done",
        "left to you: 2 places of wrong training, 2 places of failure, 1 not done; 2 places good to know",
    ]


@pytest.mark.parametrize(
    ("settings", "is_terminal", "colours"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="other terminals may not know the codes")
def test_colours_are_for_terminals(
    settings: dict[str, str], is_terminal: bool, colours: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    write(a=SCRIPT)
    assert ("\n\x1b[32m+import tfmp\x1b[0m\n" if colours else "\n+import tfmp\n") in run("a.py").out


def test_long_lines_are_wrapped_and_letters_that_steer_a_terminal_are_left_out() -> None:
    write(a=f"x = '\x1b[31m{'y' * 200}'\n")
    report = FileReport("a.py", findings=(Finding("R9", 1, Level.WRONG, "It is wrong " * 9),))
    shown = [*reporting.left_lines([report, report], Level, reporting.Style(colours=True, width=60))]
    assert shown[0] == "\x1b[1;31mTrains wrongly without an error: 2 places\x1b[0m"
    assert shown[2].startswith("\x1b[1;31mR9:\x1b[0m It is wrong It")
    assert shown[4] == "    (2 places)"
    assert shown[5].startswith("\x1b[1ma.py:1: R9:\x1b[0m x = ' [31myyy")
    assert len(shown[5]) == 60 + len("\x1b[1m\x1b[0m")


def test_json_is_one_document(run: Run) -> None:
    name = "FixedLossScaleManager"
    one, increment = f"{_CONTRIB}.{name}", "increment = global_step.assign_add(1)\nread(increment)\n"
    # Two edits of a line count once, and rules are in the order of their numbers.
    twice = f"import tensorflow.compat.v1 as tf\nx = {one}(8), {one}(8)\n"
    opt = "import tensorflow.compat.v1 as tf\ntrain_op = tf.train.AdamOptimizer().minimize(x, global_step)\n"
    write(a=opt + increment, b=UNKNOWN, c="import tensorflow\nprint 'x'\n", d=twice)
    ran = run("--json", "a.py", "b.py", "c.py", "d.py")
    assert ran.status == 1
    document = json.loads(ran.out)
    first, second, third, last = document["files"]
    edit = {"rule": "R2", "line": 2, "before": one, "after": f"tfmp.{name}"}
    edits = [{"rule": "R2", "line": 2, "before": "", "after": "import tfmp\n"}, edit, edit]
    of_last = {"path": "d.py", "changed": True, "edits": edits, "findings": [], "error": None, "error_line": None}
    assert last == of_last
    found = [(one["rule"], one["line"], one["level"]) for each in (first, second) for one in each["findings"]]
    assert found == [("R10", 3, "wrong"), ("R1", 1, "note"), ("R2", 2, "fails")]
    assert third["error"].endswith("If it is Python 2, run 2to3 or futurize first")
    assert third["error_line"] == 2
    rules = document["summary"].pop("rules")
    assert document["summary"] == {"files": 4, "changed": 1, "unchanged": 2, "not_done": 1, "written": False}
    assert [*rules.items()] == [
        ("R1", {"files": 1, "lines": 0, "wrong": 0, "fails": 0, "note": 1}),
        ("R2", {"files": 2, "lines": 2, "wrong": 0, "fails": 1, "note": 0}),
        ("R10", {"files": 1, "lines": 0, "wrong": 1, "fails": 0, "note": 0}),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_json_has_names_that_are_not_utf_8(run: Run) -> None:
    write({os.fsdecode(b"\xff.py"): "x = 1\n"})
    ran = run("--json", ".")
    assert ran.status == 0
    assert [file["path"] for file in json.loads(ran.out)["files"]] == ["./\\xff.py"]


def _variants(script: str) -> dict[str, str | bytes]:
    return {
        "ends.py": script.replace("\n", "\r\n") + "x = '\u00e9'",
        "mark.py": codecs.BOM_UTF8 + script.encode(),
        "old.py": ("# coding: latin-1\n" + script + "x = '\u00e9'\n").encode("latin-1"),
        "with a space.py": script.encode(),
        "in/gbk.py": "# coding: gbk\n# \u6df7\u5408\n".encode("gbk") + script.encode(),
    }


@pytest.mark.parametrize("program", [["git", "apply", "-p0"], ["patch", "-s", "-p0", "-i"]])
def test_diff_alone_is_a_patch(program: list[str], capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    write(_variants(SCRIPT))
    assert command.main(["--diff", "."]) == 0
    shown = capsysbinary.readouterr()
    write({"a.patch": shown.out})
    assert shown.err.startswith(b"5 files: 5 to be rewritten, 0 unchanged, 0 not done\n")
    subprocess.run([*program, "a.patch"], check=True)
    expected = {name: each.encode() if isinstance(each, str) else each for name, each in _variants(REWRITTEN).items()}
    assert {name: Path(name).read_bytes() for name in expected} == expected
