"""The whole command: its options, its exit status and what it writes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.migrate.cli.scripts import REWRITTEN, SCRIPT, UNKNOWN, ended, write
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.cli import command
from tfmp.migrate.edits import rewriting
from tfmp.migrate.edits.results import Edit, Result
from tfmp.migrate.rules import Rule

_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "commands.md"
_CANNOT_PARSE = f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot parse it"
_ADVICE = "If it is Python 2, run 2to3 or futurize first."
_PYTHON_2 = "import tensorflow\nprint 'x'\n"


def test_page_has_the_help_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["__main__.py"])
    with pytest.raises(SystemExit):
        command.main(["--help"])
    help_text = capsys.readouterr().out
    assert help_text.startswith("usage: python -m tfmp.migrate")
    assert help_text in _PAGE.read_text()


def test_by_default_it_shows_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write(a=SCRIPT)
    assert command.main(["a.py"]) == 0
    assert Path("a.py").read_text() == SCRIPT
    removed, added = SCRIPT.splitlines()[1], REWRITTEN.splitlines()[1:]
    assert capsys.readouterr().out == (
        "--- a.py\n+++ a.py\n@@ -1,2 +1,3 @@\n import tensorflow.compat.v1 as tf\n"
        f"-{removed}\n+{added[0]}\n+{added[1]}\n\n"
        "1 file: 1 to be rewritten, 0 unchanged, 0 not done\n"
        "lines to be rewritten, by rule: R2 2\n"
        "left to you: nothing\n"
        "--write makes these rewrites; --todo lists what is left without the diff and the notes.\n"
    )


def test_write_edits_and_gives_the_lines_of_the_written_file(capsys: pytest.CaptureFixture[str]) -> None:
    left = UNKNOWN.splitlines()[1]
    write(a=f"{SCRIPT}{left}\n")
    assert command.main(["--write", "a.py"]) == 1
    assert Path("a.py").read_text() == f"{REWRITTEN}{left}\n"
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("a.py:4: R2: ")
    assert lines[3:] == [
        f"    | {left}",
        "",
        "a.py: rewritten by R2",
        "1 file: 1 rewritten, 0 unchanged, 0 not done",
        "lines rewritten, by rule: R2 2",
        "left to you: 1 place of failure",
    ]


def test_a_second_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write(a=SCRIPT)
    assert command.main(["--write", "."]) == 0
    written = Path("a.py").stat()
    assert command.main(["--write", "."]) == 0
    found = Path("a.py").stat()
    # The time of the last access may be another one.
    assert (found.st_ino, found.st_mtime_ns, found.st_size) == (written.st_ino, written.st_mtime_ns, written.st_size)
    assert capsys.readouterr().out.endswith("1 file: 0 rewritten, 1 unchanged, 0 not done\nleft to you: nothing\n")


@pytest.mark.parametrize(("text", "status"), [(SCRIPT, 1), (REWRITTEN, 0), (UNKNOWN, 1), (_PYTHON_2, 1)])
def test_check_sets_the_exit_status_only(text: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    write(a=text)
    assert command.main(["--check", "a.py"]) == status
    assert Path("a.py").read_text() == text
    shown = capsys.readouterr()
    assert (shown.out, shown.err[:8]) == ("", "1 file: ")


def test_what_is_not_python_3_and_does_not_concern_tensorflow_is_nobodys_task() -> None:
    write(a="print 'x'\n", b="def f(:\n", c="import time\nprint 'x', time.clock()\n")
    assert command.main(["."]) == 0


_TABS = "Make spaces of the tabs at the starts of its lines, for example by `expand --initial`."
_MIX = "LibCST, which edits it, cannot parse its mix of tabs and spaces, which begins here"
_MIXED = (
    'import tensorflow as tf\n\n\ndef f(a):\n        """A.\n\n\tB.\n        """\n        if a:\n            a = 1\n'
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x\0", ": not done: it is binary, or in UTF-16: it has zero bytes.\n"),
        (
            _PYTHON_2,
            f":2: not done: {_CANNOT_PARSE} (Missing parentheses in call to 'print'. Did you mean print(...)?). "
            f"{_ADVICE}\n",
        ),
        ("import tensorflow\ndef f(:\n", f":2: not done: {_CANNOT_PARSE} (invalid syntax). {_ADVICE}\n"),
        (
            "import tensorflow as tf\n(name): int\nx = 1\n",
            ":2: not done: LibCST, which edits it, cannot parse this line, though Python can.\n    | (name): int\n",
        ),
        (f"{_MIXED}        elif not a:\n\t        a = 2\n", f":12: not done: {_MIX}. {_TABS}\n    | a = 2\n"),
        (
            "import tensorflow as tf\nif tf:\n\tx = 1\n        y = 2\n",
            f"(inconsistent use of tabs and spaces in indentation). {_TABS}\n    | y = 2\n",
        ),
    ],
)
def test_what_cannot_be_done_is_named_once_the_rest_is_done(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    write(a=SCRIPT, b=text, e=SCRIPT)
    assert command.main(["--write", ".", "empty", "missing"]) == 1
    assert Path("a.py").read_text() == Path("e.py").read_text() == REWRITTEN
    assert Path("b.py").read_text() == text
    shown = capsys.readouterr().out
    assert "\n./b.py:" in shown
    assert said in shown
    assert (
        "\nempty: not done: it has no Python file (hidden ones and those in __pycache__, build, node_modules, "
        "site-packages do not count).\n" in shown
    )
    assert "\nmissing: not done: it does not exist.\n" in shown


@pytest.mark.parametrize(
    "arguments", [[], [""], ["--unknown", "a.py"], ["--write", "--check", "a.py"], ["--json", "--diff", "a.py"]]
)
def test_wrong_usage_ends_with_status_2_and_calls_the_program_as_it_was_typed(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(a=SCRIPT)
    for typed, program in (("__main__.py", "python -m tfmp.migrate"), ("/usr/bin/tfmp-migrate", "tfmp-migrate")):
        monkeypatch.setattr(sys, "argv", [typed])
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
        assert capsys.readouterr().err.startswith(f"usage: {program} ")
    assert Path("a.py").read_text() == SCRIPT


def _edits_first_word(script: Script) -> Iterator[Result]:
    del script
    yield Edit("R1", 0, 6, "from")


def _edits_first_words(script: Script) -> Iterator[Result]:
    del script
    yield Edit("R3", 0, 17, "import that")


def _fails(script: Script) -> Iterator[Result]:
    raise KeyError(script.text[:6])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((_edits_first_word, _edits_first_words), "rules R1 and R3 would both change 'import tensorflow'"),
        ((_edits_first_word,), "it would not be Python after the rewrite"),
        ((_fails,), "KeyError: 'import'"),
    ],
)
def test_a_defect_of_ours_costs_one_file_and_is_owned(
    rules: tuple[Rule, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "RULES", rules)
    write(a=SCRIPT, b="x = 1\n")
    assert command.main(["--write", "."]) == 1
    shown = capsys.readouterr().out
    assert f"./a.py: not done: {message}: this is a defect of tfmp, report it.\n" in shown
    assert shown.endswith("2 files: 0 rewritten, 1 unchanged, 1 not done\nleft to you: 1 not done\n")
    assert Path("a.py").read_text() == SCRIPT


@pytest.mark.parametrize(
    ("closing", "message", "text"),
    [
        (">&-", "standard output is closed: nothing was done.", SCRIPT),
        (
            ">/dev/full",
            "the report cannot be printed: No space left on device. Files that were written stay so.",
            REWRITTEN,
        ),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_fails_is_said_in_a_sentence(closing: str, message: str, text: str) -> None:
    write(a=SCRIPT)
    done = ended("sh", "-c", f'"$0" -m tfmp.migrate --write a.py {closing}', sys.executable)
    assert (done.returncode, done.stderr) == (1, f"python -m tfmp.migrate: {message}\n")
    assert Path("a.py").read_text() == text


@pytest.mark.parametrize("package", ["tqdm", "rich"])
def test_progress_is_for_terminals_and_needs_tqdm(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    write(**{f"f{number:02}": "x = 1\n" for number in range(20)})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command.main(["."]) == 0
    shown = capsys.readouterr()
    assert shown.out == "20 files: 0 to be rewritten, 20 unchanged, 0 not done\nleft to you: nothing\n"
    assert ("20" in shown.err) == (package != "tqdm")


@pytest.mark.parametrize(
    ("package", "status", "error"),
    [
        ("tensorflow", 0, ""),
        (
            "libcst",
            2,
            "python -m tfmp.migrate: tfmp needs the package 'libcst' here, which is not installed: install tfmp with "
            "its extra, 'tfmp[migrate]'.\n",
        ),
    ],
)
def test_it_needs_libcst_and_no_tensorflow(package: str, status: int, error: str) -> None:
    write(a=SCRIPT)
    without = f"import runpy, sys; sys.modules[{package!r}] = None; "
    run = "runpy.run_module('tfmp.migrate', run_name='__main__', alter_sys=True)"
    done = ended("python", "-c", without + run, "--write", "a.py")
    assert (done.returncode, done.stderr) == (status, error)
    assert Path("a.py").read_text() == (SCRIPT if error else REWRITTEN)
