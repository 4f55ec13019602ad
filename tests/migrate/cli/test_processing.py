"""One file is rewritten, and the lines that no rule changes keep their bytes."""

import codecs
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmp.migrate.cli import files
from tfmp.migrate.cli.processing import FileReport, Job, process
from tfmp.migrate.edits.rewriting import rewrite

_SCRIPT = b"import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
_REWRITTEN = b"import tensorflow.compat.v1 as tf\nimport tfmp\nmanager = tfmp.FixedLossScaleManager(8)\n"


def _written(path: Path, content: bytes) -> FileReport:
    path.write_bytes(content)
    return process(files.Found(str(path)), Job(write=True))


def test_some_hundred_chained_calls_are_not_too_deep(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    report = _written(tmp_path / "a.py", _SCRIPT + b"x = f()" + b".g()" * 400 + b"\n")
    assert report.error is None
    assert len(report.changes) == 2
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("text", ["x = f()" + ".g()" * 20_000, "except ValueError, error:\n", "queue.async(f)\n"])
def test_what_python_does_not_parse_is_left_alone_and_named_if_it_is_of_tensorflow(text: str, tmp_path: Path) -> None:
    for content in (text.encode(), _SCRIPT + text.encode()):
        report = _written(tmp_path / "a.py", content)
        assert (report.error is None) == (content == text.encode())
        assert (tmp_path / "a.py").read_bytes() == content


def _notebook(code: str) -> bytes:
    return json.dumps({"cells": [{"cell_type": "code", "source": [code], "outputs": ["tensorflow"]}]}).encode()


def test_a_notebook_of_tensorflow_is_refused_with_advice_and_left_alone(tmp_path: Path) -> None:
    content = _notebook("%matplotlib inline\nimport tensorflow as tf")
    report = _written(tmp_path / "a.ipynb", content)
    assert re.search("it is a notebook, and its cells are not read. .*jupytext.*nbconvert", str(report.error))
    assert (tmp_path / "a.ipynb").read_bytes() == content


def test_a_notebook_of_anything_else_is_nobodys_task(tmp_path: Path) -> None:
    assert _written(tmp_path / "a.ipynb", _notebook("import torch")).error is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("requirements.txt", "tensorflow==1.15\n", "its name is not that of a script, and it imports nothing"),
        ("config.json", '{"backend": "tensorflow"}', "its name is not that of a script, and it imports nothing"),
        ("config.yaml", "backend: torch\n", "its name is not that of a script, and it imports nothing"),
        ("README.md", "# Title\n\nSome words.\n", "Its name is not that of a script either"),
        ("a.py", "import tensorflow as tf\n%matplotlib inline\n", "If the line is a command of IPython"),
        ("a.py", "import tensorflow as tf\nnames = !ls\n", "If the line is a command of IPython"),
        ("a.py", "import tensorflow as tf\nprint 1\n", "If it is Python 2"),
    ],
)
def test_a_file_that_is_no_script_is_refused_with_advice(name: str, text: str, message: str, tmp_path: Path) -> None:
    report = _written(tmp_path / name, text.encode())
    assert message in str(report.error)
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("name", ["train", "train.txt", "train.py.bak", "train.pyw"])
def test_a_script_of_another_name_is_rewritten(name: str, tmp_path: Path) -> None:
    assert _written(tmp_path / name, _SCRIPT).error is None
    assert (tmp_path / name).read_bytes() == _REWRITTEN


def test_odd_escapes_are_the_scripts_own_matter(tmp_path: Path) -> None:
    assert _written(tmp_path / "a.py", _SCRIPT + b"pattern = '\\d'\n").error is None


@pytest.mark.parametrize(
    ("lead", "end"),
    [
        (b"", b"\n"),
        (b"", b"\r\n"),
        (b"", b"\r"),
        (codecs.BOM_UTF8, b"\n"),
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
    text, encoding = files.decode((codecs.BOM_UTF8 if bom else b"") + before.encode())
    after = files.encode(rewrite(text).text, encoding).decode("utf-8-sig")
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
