"""The tutorials run as programs, on the TensorFlow and Keras of the environment; the site runs them on the newest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.typed_blocks import blocks_of

_PAGES = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("keras", "weights unchanged: True"),
        ("own_loop", "scale before and after: 65536.0 32768.0"),
        ("tf1_script", "steps applied 1, skipped 0"),
    ],
)
def test_tutorial_runs_and_shows_what_its_text_says(page: str, printed: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    program = tmp_path / "tutorial.py"
    program.write_text("\n".join(block.source for block in blocks_of(_PAGES / f"{page}.md")))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert printed in done.stdout
