"""The tutorials run as programs, on the TensorFlow and Keras of the environment; the site runs them on the newest."""

from pathlib import Path

import pytest
import python_process

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


def test_tutorials_run_and_show_what_their_texts_say(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    for page in _PRINTED:
        # Without a suffix: `keras.py` would be imported in place of Keras.
        (tmp_path / page).write_text("\n".join(block.source for block in blocks_of(_PAGES / f"{page}.md")))
    done = python_process.run("-c", _RUN_ALL, *_PRINTED, directory=tmp_path, MPLBACKEND="Agg")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    parts = [part.partition("\n") for part in done.stdout.split("RUN ")[1:]]
    shown = {page: printed for page, _, printed in parts}
    assert {page: text in shown[page] for page, text in _PRINTED.items()} == dict.fromkeys(_PRINTED, True)
