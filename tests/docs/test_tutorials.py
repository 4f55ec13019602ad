"""The tutorials run as programs, on the TensorFlow and Keras of the environment; the site runs them on the newest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.typed_blocks import blocks_of

_PAGES = Path(__file__).parents[2] / "docs" / "tutorials"


#: What each tutorial prints, and its text says. The tutorials that import TensorFlow share a process, in which it is
#: imported once. The last one only starts processes, of the script that it ports.
_PRINTED = {
    "own_loop": "scale before and after: 65536.0 32768.0",
    "keras": "weights unchanged: True",
    "tf1_script": "steps applied 1, skipped 0",
}

#: A program that runs the programs that are its arguments, each with names of its own.
_RUN_ALL = "import runpy, sys\nfor path in sys.argv[1:]: print('RUN', path); runpy.run_path(path)"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the tutorials, and return what each of them prints."""
    directory = tmp_path_factory.mktemp("tutorials")
    for page in _PRINTED:
        # Without a suffix: `keras.py` would be imported in place of Keras.
        (directory / page).write_text("\n".join(block.source for block in blocks_of(_PAGES / f"{page}.md")))
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, *_PRINTED],
        cwd=directory,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    parts = [part.partition("\n") for part in done.stdout.split("RUN ")[1:]]
    return {page: printed for page, _, printed in parts}


@pytest.mark.parametrize("page", _PRINTED)
def test_tutorial_runs_and_shows_what_its_text_says(page: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    shown = request.getfixturevalue("shown")
    assert _PRINTED[page] in shown[page]
