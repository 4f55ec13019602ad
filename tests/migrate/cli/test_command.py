"""The whole command: its options, its exit status and what it writes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.cli import command
from tfmp.migrate.edits import rewriting
from tfmp.migrate.edits.results import Edit, Result
from tfmp.migrate.rules import Rule

_SCRIPT = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
_REWRITTEN = "import tensorflow.compat.v1 as tf\nimport tfmp\nmanager = tfmp.FixedLossScaleManager(8)\n"
_UNKNOWN = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.Manager(8)\n"
_CANNOT_PARSE = f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot parse it"
_ADVICE = "If it is Python 2, run 2to3 or futurize first."
_PYTHON_2 = "import tensorflow\nprint 'x'\n"
_ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _write(**texts: str) -> None:
    for name, text in texts.items():
        Path(f"{name}.py").write_text(text)


def _process(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_by_default_it_shows_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _write(a=_SCRIPT)
    assert command.main(["a.py"]) == 0
    assert Path("a.py").read_text() == _SCRIPT
    assert capsys.readouterr().out == (
        "--- a.py\n"
        "+++ a.py\n"
        "@@ -1,2 +1,3 @@\n"
        " import tensorflow.compat.v1 as tf\n"
        "-manager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
        "+import tfmp\n"
        "+manager = tfmp.FixedLossScaleManager(8)\n"
        "\n"
        "1 file: 1 to be rewritten, 0 unchanged, 0 not done\n"
        "lines to be rewritten, by rule: R2 2\n"
        "left to you: nothing\n"
        "--write makes these rewrites; --todo lists what is left without the diff and the notes.\n"
    )


def test_write_edits_and_gives_the_lines_of_the_written_file(capsys: pytest.CaptureFixture[str]) -> None:
    _write(a=_SCRIPT + "other = tf.contrib.mixed_precision.Manager(8)\n")
    assert command.main(["--write", "a.py"]) == 1
    assert Path("a.py").read_text() == _REWRITTEN + "other = tf.contrib.mixed_precision.Manager(8)\n"
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("a.py:4: R2: ")
    assert lines[3:] == [
        "    | other = tf.contrib.mixed_precision.Manager(8)",
        "",
        "a.py: rewritten by R2",
        "1 file: 1 rewritten, 0 unchanged, 0 not done",
        "lines rewritten, by rule: R2 2",
        "left to you: 1 place of failure",
    ]


def test_a_second_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _write(a=_SCRIPT)
    assert command.main(["--write", "."]) == 0
    written = Path("a.py").stat()
    assert command.main(["--write", "."]) == 0
    found = Path("a.py").stat()
    # The time of the last access may be another one.
    assert (found.st_ino, found.st_mtime_ns, found.st_size) == (written.st_ino, written.st_mtime_ns, written.st_size)
    assert capsys.readouterr().out.endswith("1 file: 0 rewritten, 1 unchanged, 0 not done\nleft to you: nothing\n")


@pytest.mark.parametrize(("text", "status"), [(_SCRIPT, 1), (_REWRITTEN, 0), (_UNKNOWN, 1), (_PYTHON_2, 1)])
def test_check_sets_the_exit_status_only(text: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    _write(a=text)
    assert command.main(["--check", "a.py"]) == status
    assert Path("a.py").read_text() == text
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("1 file: ")


def test_what_cannot_be_done_is_named_once_the_rest_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    Path("b.py").write_bytes(b"\0")
    Path("empty").mkdir()
    _write(a=_SCRIPT, c=_PYTHON_2, d="import tensorflow\ndef f(:\n", e=_SCRIPT)
    assert command.main(["--write", ".", "empty", "missing"]) == 1
    assert Path("a.py").read_text() == Path("e.py").read_text() == _REWRITTEN
    assert [line for line in capsys.readouterr().out.splitlines() if "not done: " in line] == [
        "./b.py: not done: it is binary, or in UTF-16: it has zero bytes.",
        f"./c.py:2: not done: {_CANNOT_PARSE} (Missing parentheses in call to 'print'. Did you mean print(...)?)."
        f" {_ADVICE}",
        f"./d.py:2: not done: {_CANNOT_PARSE} (invalid syntax). {_ADVICE}",
        "empty: not done: it has no Python file (hidden ones and those in __pycache__, build, node_modules, "
        "site-packages do not count).",
        "missing: not done: it does not exist.",
    ]


@pytest.mark.parametrize(
    "arguments", [[], [""], ["--unknown", "a.py"], ["--write", "--check", "a.py"], ["--json", "--diff", "a.py"]]
)
def test_wrong_usage_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _write(a=_SCRIPT)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m tfmp.migrate" in capsys.readouterr().err
    assert Path("a.py").read_text() == _SCRIPT


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
    _write(a=_SCRIPT, b="x = 1\n")
    assert command.main(["--write", "."]) == 1
    shown = capsys.readouterr().out
    assert f"./a.py: not done: {message}: this is a defect of tfmp, report it.\n" in shown
    assert shown.endswith("2 files: 0 rewritten, 1 unchanged, 1 not done\nleft to you: 1 not done\n")
    assert Path("a.py").read_text() == _SCRIPT


def test_what_libcst_cannot_parse_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    _write(a="import tensorflow as tf\n(name): int\nx = 1\n")
    assert command.main(["a.py"]) == 1
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "a.py:2: not done: LibCST, which edits it, cannot parse this line, though Python can.",
        "    | (name): int",
    ]


def test_a_file_that_mixes_tabs_and_spaces_is_named_with_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = (
        'import tensorflow as tf\n\n\ndef f(a):\n        """A.\n\n\tB.\n        """\n        if a:\n            a = 1\n'
    )
    _write(
        a=f"{mixed}        elif not a:\n\t        a = 2\n",
        b="import tensorflow as tf\nif tf:\n\tx = 1\n        y = 2\n",
    )
    assert command.main(["."]) == 1
    told = "Make spaces of the tabs at the starts of its lines, for example by `expand --initial`."
    shown = capsys.readouterr().out
    mix = "LibCST, which edits it, cannot parse its mix of tabs and spaces, which begins here"
    assert f"./a.py:12: not done: {mix}. {told}\n    | a = 2\n" in shown
    assert f"(inconsistent use of tabs and spaces in indentation). {told}\n    | y = 2\n" in shown


def test_what_is_not_python_3_and_does_not_concern_tensorflow_is_nobodys_task() -> None:
    _write(a="print 'x'\n", b="def f(:\n", c="import time\nprint 'x', time.clock()\n")
    assert command.main(["."]) == 0


def _without(package: str) -> str:
    return (
        f"import runpy, sys; sys.modules[{package!r}] = None; "
        "runpy.run_module('tfmp.migrate', run_name='__main__', alter_sys=True)"
    )


def test_the_program_is_called_as_it_was_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tfmp-migrate"])
    with pytest.raises(SystemExit):
        command.main([])
    assert capsys.readouterr().err.startswith("usage: tfmp-migrate ")


@pytest.mark.parametrize(
    ("closing", "message", "text"),
    [
        (">&-", "standard output is closed: nothing was done.", _SCRIPT),
        (
            ">/dev/full",
            "the report cannot be printed: No space left on device. Files that were written stay so.",
            _REWRITTEN,
        ),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_fails_is_said_in_a_sentence(closing: str, message: str, text: str) -> None:
    _write(a=_SCRIPT)
    program = f'"$0" -m tfmp.migrate --write a.py {closing}'
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    ended = subprocess.run(
        ["sh", "-c", program, sys.executable], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, f"python -m tfmp.migrate: {message}\n")
    assert Path("a.py").read_text() == text


@pytest.mark.parametrize("package", ["tqdm", "rich"])
def test_progress_is_for_terminals_and_needs_tqdm(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    _write(**{f"f{number:02}": "x = 1\n" for number in range(20)})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command.main(["."]) == 0
    shown = capsys.readouterr()
    assert shown.out == "20 files: 0 to be rewritten, 20 unchanged, 0 not done\nleft to you: nothing\n"
    assert ("20" in shown.err) == (package != "tqdm")


def test_it_works_where_tensorflow_is_not_installed() -> None:
    _write(a=_SCRIPT)
    ended = _process(_without("tensorflow"), "--write", "a.py")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert Path("a.py").read_text() == _REWRITTEN


def test_without_libcst_it_names_the_extra() -> None:
    _write(a=_SCRIPT)
    ended = _process(_without("libcst"), "a.py")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "python -m tfmp.migrate: tfmp needs the package 'libcst' here, which is not installed: install tfmp with its "
        "extra, 'tfmp[migrate]'.\n"
    )
