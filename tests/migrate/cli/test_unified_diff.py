"""The diff is accepted by `git apply` and by `patch`."""

import codecs
import subprocess
from pathlib import Path

import pytest

from tfmp.migrate.cli import command

_SCRIPT = "import tensorflow.compat.v1 as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(8)\n"
_REWRITTEN = "import tensorflow.compat.v1 as tf\nimport tfmp\nmanager = tfmp.FixedLossScaleManager(8)\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    for name, content in variants(_SCRIPT).items():
        Path(name).write_bytes(content)
    assert command.main(["--diff", "."]) == 0
    shown = capsysbinary.readouterr()
    Path("a.patch").write_bytes(shown.out)
    assert shown.err.startswith(b"5 files: 5 to be rewritten, 0 unchanged, 0 not done\n")
    subprocess.run([*program, "a.patch"], check=True)
    assert {name: Path(name).read_bytes() for name in variants("")} == variants(_REWRITTEN)
