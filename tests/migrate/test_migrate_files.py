"""Finding, reading, and replacing files; every byte that is not rewritten stays."""

import ast
import codecs
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmp.migrate.cli import files, syntax
from tfmp.migrate.cli.processing import FileReport, Job, process
from tfmp.migrate.edits.rewriting import rewrite

_SCRIPT = b"import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
_REWRITTEN = b"import tensorflow.compat.v1 as tf\nimport tfmp\nmanager = tfmp.FixedLossScaleManager(8)\n"

_CANNOT_PARSE = rf"^Python {sys.version_info[0]}\.{sys.version_info[1]} cannot parse it: "
_KEYWORD = r"^async and await are keywords since Python 3\.7: "


def _written(path: Path, content: bytes) -> FileReport:
    path.write_bytes(content)
    return process(files.Found(str(path)), Job(write=True))


def _names(found: list[files.Found], top: Path) -> list[str]:
    return [os.path.relpath(one.path, top) for one in found]


def _make(top: Path, *names: str) -> None:
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_directory_stands_for_its_python_files_in_order(tmp_path: Path) -> None:
    _make(tmp_path, "b.py", "a/z.py", "a/deeper/y.py", "a.txt", "c/readme.md")
    assert _names(files.find([str(tmp_path)]), tmp_path) == ["a/deeper/y.py", "a/z.py", "b.py"]


@pytest.mark.parametrize(
    "name",
    [".git/x.py", "__pycache__/x.py", "lib/site-packages/m/x.py", "node_modules/x.py", "build/lib/x.py", ".x.py"],
)
def test_files_of_others_are_left_out_unless_named(name: str, tmp_path: Path) -> None:
    _make(tmp_path, name, "own.py")
    assert _names(files.find([str(tmp_path)]), tmp_path) == ["own.py"]
    assert _names(files.find([str(tmp_path / name)]), tmp_path) == [name]


def test_a_named_file_needs_no_python_name(tmp_path: Path) -> None:
    _make(tmp_path, "train")
    assert files.find([str(tmp_path / "train")]) == [files.Found(str(tmp_path / "train"))]


def test_a_file_reached_by_two_paths_is_taken_once(tmp_path: Path) -> None:
    _make(tmp_path, "a.py", "b.py")
    (tmp_path / "c.py").symlink_to("a.py")
    found = files.find([str(tmp_path / "b.py"), str(tmp_path), str(tmp_path / "." / "a.py")])
    assert _names(found, tmp_path) == ["b.py", "a.py"]


def test_paths_that_hold_nothing_are_named(tmp_path: Path) -> None:
    _make(tmp_path, "empty/readme.md")
    _make(tmp_path, "made/build/lib/a.py", "made/x/.git/b.py", "made/x/build/c.txt")
    found = files.find([str(tmp_path / name) for name in ("empty", "made", "missing")])
    assert [(one.error, one.is_file) for one in found] == [
        ("there is no Python file in this directory", False),
        ("there is no Python file in this directory outside of .git, build, left out unless given by name", False),
        ("it does not exist", True),
    ]


def test_links_that_lead_out_of_a_directory_are_followed_only_if_named(tmp_path: Path) -> None:
    _make(tmp_path, "in/a.py", "out/b.py", "out/c.py")
    for name, target in (("again", "a.py"), ("b", "../out/b.py"), ("c", "../out/c.py")):
        (tmp_path / "in" / f"{name}.py").symlink_to(target)
    (tmp_path / "in" / "all").symlink_to("../out")
    found = files.find([str(tmp_path / "in"), str(tmp_path / "in" / "c.py")])
    assert _names(found, tmp_path) == ["in/a.py", "in/b.py", "in/c.py"]
    assert [one.error for one in found] == [
        None,
        f"it is a link that leads out of the directory, to {tmp_path}/out/b.py: give it by name to have it followed",
        None,
    ]
    assert _names(files.find([str(tmp_path)]), tmp_path) == ["in/a.py", "in/b.py", "in/c.py"]


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "dangling.py").symlink_to("nowhere")
    (tmp_path / "directory.py").mkdir()
    reports = [process(found, Job()) for found in files.find([str(tmp_path)])]
    assert [report.error for report in reports] == [
        "it cannot be read: No such file or directory",
        "it is not a regular file",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = 1\0\n", "it is binary, or in UTF-16: it has zero bytes"),
        ("x = 1\n".encode("utf-16"), "it is binary, or in UTF-16: it has zero bytes"),
        (b"# coding: nonsense\n", "unknown encoding: nonsense.*name the right one in a coding line"),
        (b"# coding: rot13\n", "its coding line names rot13, which is no encoding of text"),
        (b"x = 1\ny = 2\rz = '\xe9'\n", "line 3 is not utf-8: name the encoding in a coding line, or convert the file"),
        (b"x = '\xe9'\n", "Python cannot tell its encoding"),
        (codecs.BOM_UTF8 + b"# coding: latin-1\n", "Python cannot tell its encoding"),
        (b"# coding: utf-7\nx = '+AOk-+AOk-'\n", "decoding it as utf-7 and encoding it again gives other bytes"),
    ],
)
def test_a_file_that_is_no_text_is_named_and_left_alone(content: bytes, message: str, tmp_path: Path) -> None:
    report = _written(tmp_path / "a.py", content)
    assert re.search(message, str(report.error))
    assert (tmp_path / "a.py").read_bytes() == content


@pytest.mark.parametrize(
    "text",
    [
        "print 'step', step\n",
        "print step\n",
        "exec 'x = 1'\n",
        "try:\n  pass\nexcept ValueError, error:\n  raise\n",
        "raise ValueError, 'no'\n",
        "mode = 0755\n",
        "big = 10L\n",
        "if a <> b: pass\n",
        "text = `a`\n",
        "text = ur'a'\n",
        "def f(a, (b, c)): pass\n",
    ],
)
def test_python_2_is_called_by_its_name(text: str) -> None:
    with pytest.raises(syntax.NotPythonError, match=r"^Python 2: run 2to3 or futurize first$") as raised:
        syntax.check(f"x = 1\n{text}")
    assert raised.value.line == (4 if "except" in text else 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", _CANNOT_PARSE),
        ("printer = [(1, 2]\n", _CANNOT_PARSE),
        ("del x = 0.001\n", _CANNOT_PARSE),
        ("if 1:\n\tx = 1\n        y = 2\n", "^tabs and spaces are mixed in its indentation, which Python 3 refuses"),
        ("async = True\n", _KEYWORD),
        ("queue.async(f)\n", _KEYWORD),
        ("f(x, async=True)\n", _KEYWORD),
        ("from asyncio import async\n", _KEYWORD),
        ("await = 1\n", _KEYWORD),
        ("async def f(:\n    await g()\n", _CANNOT_PARSE),
        ("x = f()" + ".g()" * 20_000, "^its expressions are nested too deep to be read$"),
    ],
)
def test_other_faults_are_told_apart_from_python_2(text: str, message: str) -> None:
    with pytest.raises(syntax.NotPythonError, match=message):
        syntax.check(text)


def test_some_hundred_chained_calls_are_not_too_deep(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    report = _written(tmp_path / "a.py", _SCRIPT + b"x = f()" + b".g()" * 400 + b"\n")
    assert report.error is None
    assert len(report.changes) == 2
    assert sys.getrecursionlimit() == limit


def test_odd_escapes_are_the_scripts_own_matter() -> None:
    syntax.check("pattern = '\\d'\n")


def test_an_edited_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_bytes(b"")
    path.chmod(0o751)
    _written(path, _SCRIPT)
    assert path.read_bytes() == _REWRITTEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert list(tmp_path.iterdir()) == [path]


def test_of_a_link_the_target_is_edited(tmp_path: Path) -> None:
    target = tmp_path / "real" / "target.py"
    _make(tmp_path, "real/target.py")
    (tmp_path / "link.py").symlink_to("real/target.py")
    _written(tmp_path / "link.py", _SCRIPT)
    assert (tmp_path / "link.py").is_symlink()
    assert target.read_bytes() == _REWRITTEN


def test_a_file_that_changes_while_it_is_worked_on_keeps_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"

    def saved_meanwhile(text: str) -> ast.Module:
        path.write_bytes(b"x = 1\n")
        return ast.parse(text)

    monkeypatch.setattr(syntax, "check", saved_meanwhile)
    report = _written(path, _SCRIPT)
    assert report.error == "it changed meanwhile: run this again"
    assert path.read_bytes() == b"x = 1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_protected_file_is_left_alone_for_root_too(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(_SCRIPT)
    path.chmod(0o444)
    report = process(files.Found(str(path)), Job(write=True))
    assert report.error == "it cannot be written: it is read-only"
    assert path.read_bytes() == _SCRIPT


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory, seen by a user whom permissions bind: root is not."""
    # Not tmp_path: the directories above that are closed to everybody else.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.chdir(directory)
        user = os.geteuid()
        os.chown(directory, user or 65534, -1)
        os.seteuid(user or 65534)
        try:
            yield Path()
        finally:
            os.seteuid(user)
            monkeypatch.undo()


def test_files_without_permission_are_named_and_left_alone(mortal: Path) -> None:
    _make(mortal, "closed/a.py")
    for name, mode in (("secret.py", 0o000), ("protected.py", 0o444), ("open.py", 0o600)):
        (mortal / name).write_bytes(_SCRIPT)
        (mortal / name).chmod(mode)
    (mortal / "closed").chmod(0o000)
    reports = [process(found, Job(write=True)) for found in files.find(["."])]
    (mortal / "closed").chmod(0o700)
    assert [(report.path, report.error) for report in reports] == [
        ("./closed", "it cannot be read: Permission denied"),
        ("./open.py", None),
        ("./protected.py", "it cannot be written: it is read-only"),
        ("./secret.py", "it cannot be read: Permission denied"),
    ]
    assert (mortal / "open.py").read_bytes() == _REWRITTEN
    assert (mortal / "protected.py").read_bytes() == _SCRIPT


def test_a_file_in_a_protected_directory_is_named_and_left_alone(mortal: Path) -> None:
    _make(mortal, "closed/a.py")
    (mortal / "closed/a.py").write_bytes(_SCRIPT)
    (mortal / "closed").chmod(0o500)
    report = process(files.Found("closed/a.py"), Job(write=True))
    (mortal / "closed").chmod(0o700)
    assert report.error == "it cannot be written: its directory cannot be written"
    assert not report.changes
    assert (mortal / "closed/a.py").read_bytes() == _SCRIPT


@pytest.mark.parametrize(
    ("lead", "end"),
    [
        (b"", b"\n"),
        (b"", b"\r\n"),
        (b"", b"\r"),
        (codecs.BOM_UTF8, b"\n"),
        (b"\f", b"\n"),
        ("# coding: latin-1\n# \u00e9\n".encode("latin-1"), b"\r\n"),
        ("# -*- coding: gbk -*-\n# \u6df7\u5408\n".encode("gbk"), b"\n"),
    ],
)
def test_bytes_that_are_not_rewritten_stay(lead: bytes, end: bytes, tmp_path: Path) -> None:
    before, after = (lead + script.replace(b"\n", end) for script in (_SCRIPT, _REWRITTEN))
    if lead.startswith(b"#"):
        # A line that is added ends as the file's first line does.
        after = after.replace(b"import tfmp" + end, b"import tfmp\n")
    report = _written(tmp_path / "a.py", before)
    assert report.error is None
    assert (tmp_path / "a.py").read_bytes() == after


def test_form_feeds_that_libcst_moves_leave_the_file_alone(tmp_path: Path) -> None:
    content = _SCRIPT + b"if manager:\n\f    x = 1\n    y = 2\n"
    report = _written(tmp_path / "a.py", content)
    assert "form feeds in its indentation" in str(report.error)
    assert (tmp_path / "a.py").read_bytes() == content


_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
_LINES = st.sampled_from(
    [
        "",
        "\f",
        "   ",
        "x = 1  ",
        "if x:\n\ty = '''\r\n\t'''\n",
        "# \u00e9\f\u00fc",
        "z = 'a\\\nb'",
        "def f(a,\tb):\treturn a",
        "\u00e9 = {1:2,}",
        "s = '\u2028'; t = 1;",
    ]
)


@given(
    lines=st.lists(st.tuples(_LINES, _ENDS), max_size=8),
    place=st.integers(0, 8),
    end=_ENDS,
    last_end=st.sampled_from(["", "\n", "\r\n", "\r"]),
    bom=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_untouched_lines_keep_their_bytes(
    lines: list[tuple[str, str]], place: int, end: str, last_end: str, *, bom: bool
) -> None:
    written = [line + line_end for line, line_end in lines]
    script = [
        "import tensorflow.compat.v1 as tf" + end,
        "m = tf.contrib.mixed_precision.FixedLossScaleManager(8)" + end,
    ]
    before = "".join([*written[:place], *script, *written[place:], "last = 1", last_end])
    source = files.decode((codecs.BOM_UTF8 if bom else b"") + before.encode())
    after = files.encode(source, rewrite(source.text).text).decode("utf-8-sig")
    added = re.findall(r"import tfmp(?:\r\n|\r|\n)", after)
    assert len(added) == 1
    assert after.replace(added[0], "", 1).replace("tfmp.", "tf.contrib.mixed_precision.") == before


def test_what_is_said_of_a_written_file_has_the_lines_of_that_file(tmp_path: Path) -> None:
    unknown = "x = tf.contrib.mixed_precision.Nothing\n"
    path = tmp_path / "script.py"
    path.write_text("import tensorflow as tf\n" + unknown + _SCRIPT.decode() + unknown)
    report = process(files.Found(str(path)), Job(write=True))
    lines = path.read_text().splitlines()
    assert [finding.line for finding in report.findings] == [3, 6]
    assert all("Nothing" in lines[finding.line - 1] for finding in report.findings)
    assert [change.line for change in report.changes] == [2, 5]
    assert all("tfmp" in lines[change.line - 1] for change in report.changes)
