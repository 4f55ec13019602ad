"""Which files the command finds, how it reads them, and how it replaces them."""

import ast
import codecs
import gc
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfmp.migrate.cli import files, modules
from tfmp.migrate.cli.processing import FileReport, Job, process

_SCRIPT = b"import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
_REWRITTEN = b"import tensorflow.compat.v1 as tf\nimport tfmp\nmanager = tfmp.FixedLossScaleManager(8)\n"


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


def test_a_directory_stands_for_its_notebooks_too(tmp_path: Path) -> None:
    _make(tmp_path, "b.py", "a.ipynb", "deeper/c.IPYNB", ".ipynb_checkpoints/a.ipynb", ".d.ipynb")
    assert _names(files.find([str(tmp_path)]), tmp_path) == ["a.ipynb", "b.py", "deeper/c.IPYNB"]


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ([{"cell_type": "code", "source": ["x = 1\n", "y"]}, {"cell_type": "code", "source": "z"}], "x = 1\ny\nz"),
        ([{"cell_type": "markdown", "source": ["tensorflow"]}], ""),
        ([{"cell_type": "code", "input": ["x"], "outputs": [{"text": "tensorflow"}]}], "x"),
    ],
)
def test_the_code_of_a_notebook_is_that_of_its_code_cells(cells: list[object], code: str) -> None:
    assert files.notebook_code(json.dumps({"cells": cells})) == code
    assert files.notebook_code(json.dumps({"worksheets": [{"cells": cells}]})) == code


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"cells": 1}', '{"cells": [{"source": "x"}]}', "import tensorflow"])
def test_what_is_no_notebook_is_said_to_be_none(text: str) -> None:
    with pytest.raises(files.UnusableFileError, match="it is no notebook, though it is named as one"):
        files.notebook_code(text)


def test_a_named_file_needs_no_python_name(tmp_path: Path) -> None:
    _make(tmp_path, "train")
    assert files.find([str(tmp_path / "train")]) == [files.Found(str(tmp_path / "train"))]


def test_a_file_reached_by_two_paths_is_taken_once(tmp_path: Path) -> None:
    _make(tmp_path, "a.py", "b.py")
    (tmp_path / "c.py").symlink_to("a.py")
    found = files.find([str(tmp_path / "b.py"), str(tmp_path), str(tmp_path / "." / "a.py")])
    assert _names(found, tmp_path) == ["b.py", "a.py"]


def test_paths_that_hold_nothing_are_named(tmp_path: Path) -> None:
    _make(tmp_path, "empty/readme.md", "made/build/lib/a.py", "made/x/.git/b.py")
    found = files.find([str(tmp_path / name) for name in ("empty", "made", "missing")])
    assert [str(one.error)[:21] for one in found] == [
        "it has no Python file",
        "it has no Python file",
        "it does not exist",
    ]


def test_links_are_followed_only_if_named(tmp_path: Path) -> None:
    _make(tmp_path, "in/a.py", "out/b.py", "out/c.py")
    for name, target in (("again", "a.py"), ("b", "../out/b.py"), ("c", "../out/c.py")):
        (tmp_path / "in" / f"{name}.py").symlink_to(target)
    (tmp_path / "in" / "all").symlink_to("../out")
    found = files.find([str(tmp_path / "in"), str(tmp_path / "in" / "c.py")])
    assert [(os.path.relpath(one.path, tmp_path), one.error is None) for one in found] == [
        ("in/a.py", True),
        ("in/b.py", False),
        ("in/c.py", True),
    ]
    assert _names(files.find([str(tmp_path)]), tmp_path) == ["in/a.py", "out/b.py", "out/c.py"]
    assert _names(files.find([str(tmp_path / "in" / "all")]), tmp_path) == ["in/all/b.py", "in/all/c.py"]


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "dangling.py").symlink_to("nowhere")
    (tmp_path / "directory.py").mkdir()
    reports = [process(found, Job()) for found in files.find([str(tmp_path / "dangling.py"), str(tmp_path)])]
    assert [report.error for report in reports] == [
        "it cannot be read: No such file or directory",
        "it is not a regular file",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = 1\0\n", "it is binary, or in UTF-16: it has zero bytes"),
        ("x = 1\n".encode("utf-16"), "it is binary, or in UTF-16: it has zero bytes"),
        (b"# coding: nonsense\n", "unknown encoding: nonsense.*name its encoding in a coding line"),
        (b"# coding: rot13\n", "'rot13' is not a text encoding"),
        (b"x = 1\ny = 2\rz = '\xe9'\n", "it cannot be decoded: 'utf-8' codec can't decode byte 0xe9"),
        (b"x = '\xe9'\n", "it cannot be decoded: "),
        (codecs.BOM_UTF8 + b"# coding: latin-1\n", "it cannot be decoded: "),
        (b"# coding: utf-7\nx = '+AOk-+AOk-'\n", "decoding it as utf-7 and encoding it again gives other bytes"),
    ],
)
def test_a_file_that_is_no_text_is_named_and_left_alone(content: bytes, message: str, tmp_path: Path) -> None:
    report = _written(tmp_path / "a.py", content)
    assert re.search(message, str(report.error))
    assert (tmp_path / "a.py").read_bytes() == content


def test_form_feeds_at_the_start_are_kept(tmp_path: Path) -> None:
    _written(tmp_path / "a.py", b"\f\f" + _SCRIPT)
    assert (tmp_path / "a.py").read_bytes() == b"\f\f" + _REWRITTEN


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

    def saved_meanwhile(tree: ast.Module) -> modules.Module:
        del tree
        path.write_bytes(b"x = 1\n")
        return modules.Module()

    monkeypatch.setattr(modules, "read", saved_meanwhile)
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
        # What earlier tests left to the garbage collector may own files of the first user: this
        # one may not delete them.
        gc.collect()
        gc.disable()
        os.seteuid(user or 65534)
        try:
            yield Path()
        finally:
            os.seteuid(user)
            gc.enable()
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
