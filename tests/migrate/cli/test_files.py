"""Which files the command finds, how it reads and replaces them, and which bytes stay as they are."""

import ast
import codecs
import gc
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.migrate.cli import scripts
from tests.migrate.cli.scripts import write
from tfmp.migrate.cli import files, modules
from tfmp.migrate.cli.processing import FileReport, Job, process
from tfmp.migrate.edits.rewriting import rewrite

_SCRIPT, _REWRITTEN = scripts.SCRIPT.encode(), scripts.REWRITTEN.encode()


def _written(name: str, content: bytes) -> FileReport:
    """Write a file, and let it be rewritten."""
    write({name: content})
    return process(files.Found(name), Job(write=True))


def _names(*paths: str) -> list[str]:
    """Return the names of the files that are found."""
    return [os.path.relpath(one.path) for one in files.find(paths)]


def _make(*names: str) -> None:
    write(dict.fromkeys(names, b""))


def test_directory_stands_for_its_python_files_and_notebooks_in_order_without_those_of_others() -> None:
    own = ["a/deeper/y.py", "a/z.py", "a.ipynb", "b.py", "deeper/c.IPYNB"]
    others = [".git/x.py", "__pycache__/x.py", "lib/site-packages/m/x.py", "node_modules/x.py", "build/lib/x.py"]
    others += [".x.py", ".ipynb_checkpoints/a.ipynb", ".d.ipynb"]
    _make(*own[::-1], *others, "a.txt", "c/readme.md")
    assert _names(".") == own
    # What is named is taken.
    assert [_names(name) for name in others] == [[name] for name in others]


def test_a_named_file_needs_no_python_name_and_is_taken_once_by_all_its_paths() -> None:
    _make("train", "a.py", "b.py")
    Path("c.py").symlink_to("a.py")
    assert _names("train", "b.py", ".", "./a.py") == ["train", "b.py", "a.py"]


def test_links_are_followed_only_if_named() -> None:
    _make("in/a.py", "out/b.py", "out/c.py")
    for name, target in (("again.py", "a.py"), ("b.py", "../out/b.py"), ("c.py", "../out/c.py"), ("all", "../out")):
        Path("in", name).symlink_to(target)
    found = files.find(["in", "in/c.py"])
    assert [one.path for one in found] == ["in/a.py", "in/b.py", "in/c.py"]
    assert [one.error is None for one in found] == [True, False, True]
    assert _names(".") == ["in/a.py", "out/b.py", "out/c.py"]
    assert _names("in/all") == ["in/all/b.py", "in/all/c.py"]


def test_what_is_no_regular_file_or_holds_none_is_named() -> None:
    _make("empty/readme.md", "made/build/lib/a.py", "made/x/.git/b.py")
    os.mkfifo("pipe.py")
    Path("dangling.py").symlink_to("nowhere")
    Path("directory.py").mkdir()
    reports = [process(found, Job()) for found in files.find(["dangling.py", "empty", "made", "missing", "."])]
    assert [str(report.error).partition(" (")[0] for report in reports] == [
        "it cannot be read: No such file or directory",
        "it has no Python file",
        "it has no Python file",
        "it does not exist",
        "it is not a regular file",
    ]


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


def _notebook(code: str) -> bytes:
    return json.dumps({"cells": [{"cell_type": "code", "source": [code], "outputs": ["tensorflow"]}]}).encode()


_TENSORFLOW = b"import tensorflow as tf\n"
_NO_SCRIPT = "its name is not that of a script, and it imports nothing"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.py", b"x = 1\0\n", "it is binary, or in UTF-16: it has zero bytes"),
        ("a.py", "x = 1\n".encode("utf-16"), "it is binary, or in UTF-16: it has zero bytes"),
        ("a.py", b"# coding: nonsense\n", "unknown encoding: nonsense.*name its encoding in a coding line"),
        ("a.py", b"# coding: rot13\n", "'rot13' is not a text encoding"),
        ("a.py", b"x = 1\ny = 2\rz = '\xe9'\n", "it cannot be decoded: 'utf-8' codec can't decode byte 0xe9"),
        ("a.py", b"x = '\xe9'\n", "it cannot be decoded: "),
        ("a.py", codecs.BOM_UTF8 + b"# coding: latin-1\n", "it cannot be decoded: "),
        ("a.py", b"# coding: utf-7\nx = '+AOk-+AOk-'\n", "decoding it as utf-7 and encoding it again gives other"),
        # LibCST moves them.
        ("a.py", _SCRIPT + b"if manager:\n\f    x = 1\n    y = 2\n", "form feeds in its indentation"),
        ("a.py", _TENSORFLOW + b"%matplotlib inline\n", "If the line is a command of IPython"),
        ("a.py", _TENSORFLOW + b"names = !ls\n", "If the line is a command of IPython"),
        ("a.py", _TENSORFLOW + b"print 1\n", "If it is Python 2"),
        ("a.ipynb", _notebook("%matplotlib inline\nimport tensorflow as tf"), "a notebook, .*jupytext.*nbconvert"),
        *(
            ("a.ipynb", content, "it is no notebook, though it is named as one")
            for content in (b"", b"[1]", b"{", b'{"cells": 1}', b'{"cells": [{"source": "x"}]}', _TENSORFLOW)
        ),
        ("requirements.txt", b"tensorflow==1.15\n", _NO_SCRIPT),
        ("config.json", b'{"backend": "tensorflow"}', _NO_SCRIPT),
        ("config.yaml", b"backend: torch\n", _NO_SCRIPT),
        ("README.md", b"# Title\n\nSome words.\n", "Its name is not that of a script either"),
    ],
)
def test_a_file_that_is_no_script_is_refused_with_advice_and_left_alone(
    name: str, content: bytes, message: str
) -> None:
    assert re.search(message, str(_written(name, content).error))
    assert Path(name).read_bytes() == content


@pytest.mark.parametrize("text", ["x = f()" + ".g()" * 20_000, "except ValueError, error:\n", "queue.async(f)\n"])
def test_what_python_does_not_parse_is_left_alone_and_named_if_it_is_of_tensorflow(text: str) -> None:
    for content in (text.encode(), _SCRIPT + text.encode()):
        assert (_written("a.py", content).error is None) == (content == text.encode())
        assert Path("a.py").read_bytes() == content


def test_a_notebook_of_anything_else_is_nobodys_task() -> None:
    assert _written("a.ipynb", _notebook("import torch")).error is None


def _with_ends(end: bytes, lead: bytes = b"") -> tuple[str, bytes, bytes]:
    before, after = (lead + script.replace(b"\n", end) for script in (_SCRIPT, _REWRITTEN))
    if lead.startswith(b"#"):
        # A line that is added ends as the file's first line does.
        after = after.replace(b"import tfmp" + end, b"import tfmp\n")
    return "a.py", before, after


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, _SCRIPT, _REWRITTEN) for name in ("train", "train.txt", "train.py.bak", "train.pyw")),
        _with_ends(b"\r"),
        _with_ends(b"\n", codecs.BOM_UTF8),
        _with_ends(b"\r\n", "# coding: latin-1\n# \u00e9\n".encode("latin-1")),
        _with_ends(b"\n", "# -*- coding: gbk -*-\n# \u6df7\u5408\n".encode("gbk")),
        ("a.py", b"\f\f" + _SCRIPT, b"\f\f" + _REWRITTEN),
        # An odd escape is the script's own matter.
        ("a.py", _SCRIPT + b"pattern = '\\d'\n", _REWRITTEN + b"pattern = '\\d'\n"),
        ("a.py", _SCRIPT + b"x = f()" + b".g()" * 400 + b"\n", _REWRITTEN + b"x = f()" + b".g()" * 400 + b"\n"),
    ],
)
def test_bytes_that_are_not_rewritten_stay(name: str, before: bytes, after: bytes) -> None:
    limit = sys.getrecursionlimit()
    assert _written(name, before).error is None
    assert Path(name).read_bytes() == after
    assert sys.getrecursionlimit() == limit


_ENDS = ["\n", "\r\n", "\r"]
_LINES = [
    *("", "\f", "   ", "x = 1  ", "if x:\n\ty = '''\r\n\t'''\n", "# \u00e9\f\u00fc", "z = 'a\\\nb'"),
    *("def f(a,\tb):\treturn a", "\u00e9 = {1:2,}", "s = '\u2028'; t = 1;"),
]


@pytest.mark.parametrize("end", _ENDS)
@pytest.mark.parametrize("end_of_script", _ENDS)
def test_untouched_lines_keep_their_bytes(end_of_script: str, end: str) -> None:
    script, others = scripts.SCRIPT.replace("\n", end_of_script), "".join(line + end for line in _LINES)
    for before in (f"{others}{script}last = 1", f"{script}{others}", f"{others}{script}{others}last = 1{end}"):
        text, encoding = files.decode(before.encode())
        after = files.encode(rewrite(text).text, encoding).decode()
        [added] = re.findall(r"import tfmp(?:\r\n|\r|\n)", after)
        assert after.replace(added, "", 1).replace("tfmp.", "tf.contrib.mixed_precision.") == before


def test_an_edited_file_keeps_its_permissions_and_of_a_link_the_target_is_edited() -> None:
    _make("real/run.py")
    Path("real/run.py").chmod(0o751)
    Path("link.py").symlink_to("real/run.py")
    _written("link.py", _SCRIPT)
    assert Path("link.py").is_symlink()
    assert Path("real/run.py").read_bytes() == _REWRITTEN
    assert stat.S_IMODE(Path("real/run.py").stat().st_mode) == 0o751
    assert [*Path("real").iterdir()] == [Path("real/run.py")]


def test_a_file_that_changes_while_it_is_worked_on_keeps_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def saved_meanwhile(tree: ast.Module) -> modules.Module:
        del tree
        Path("a.py").write_bytes(b"x = 1\n")
        return modules.Module()

    monkeypatch.setattr(modules, "read", saved_meanwhile)
    assert _written("a.py", _SCRIPT).error == "it changed meanwhile: run this again"
    assert Path("a.py").read_bytes() == b"x = 1\n"
    assert [*Path().iterdir()] == [Path("a.py")]


def test_a_protected_file_is_left_alone_for_root_too() -> None:
    Path("a.py").write_bytes(_SCRIPT)
    Path("a.py").chmod(0o444)
    assert process(files.Found("a.py"), Job(write=True)).error == "it cannot be written: it is read-only"
    assert Path("a.py").read_bytes() == _SCRIPT


@pytest.fixture
def _mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test in a directory as a user whom permissions bind: root is not."""
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
            yield
        finally:
            os.seteuid(user)
            gc.enable()
            monkeypatch.undo()


@pytest.mark.usefixtures("_mortal")
def test_files_without_permission_are_named_and_left_alone() -> None:
    _make("closed/a.py", "locked/a.py")
    for name, mode in (("secret.py", 0o000), ("protected.py", 0o444), ("open.py", 0o600), ("locked/a.py", 0o600)):
        Path(name).write_bytes(_SCRIPT)
        Path(name).chmod(mode)
    Path("closed").chmod(0o000)
    Path("locked").chmod(0o500)
    reports = [process(found, Job(write=True)) for found in files.find(["."])]
    for name in ("closed", "locked"):
        Path(name).chmod(0o700)
    assert [(report.path, report.error, bool(report.changes)) for report in reports] == [
        ("./closed", "it cannot be read: Permission denied", False),
        ("./locked/a.py", "it cannot be written: its directory cannot be written", False),
        ("./open.py", None, True),
        ("./protected.py", "it cannot be written: it is read-only", False),
        ("./secret.py", "it cannot be read: Permission denied", False),
    ]
    assert Path("open.py").read_bytes() == _REWRITTEN
    assert Path("protected.py").read_bytes() == Path("locked/a.py").read_bytes() == _SCRIPT
