"""Importing tfmp does not change what an import of Keras does."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfmp


def _python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    root = Path(tfmp.__file__).parent.parent
    code = f"import sys; sys.path[:0] = {[str(entry) for entry in (*path, root)]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("content", ["", "__version__ = '3.15.1'\n", "__version__ = '1.2'\nsaving = None\n"])
def test_package_that_only_has_the_name_of_keras_is_imported_as_ever(tmp_path: Path, content: str) -> None:
    (tmp_path / "keras.py").write_text(content)
    done = _python("import tfmp, keras; print(keras.__file__)", tmp_path)
    assert done.stdout.strip() == str(tmp_path / "keras.py"), done.stderr
