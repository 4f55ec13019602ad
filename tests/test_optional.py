"""A missing or old package is an error that says what to install."""

import types
from pathlib import Path

import pytest
import tensorflow as tf

from tfmp.optional import refuse_old_keras, require


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("2.15.0", False), ("3.0.5", True), ("3.4.1", True), ("3.5.0", False), ("3.15.1", False)],
)
def test_old_keras_is_one_clear_error(version: str, is_refused: bool) -> None:
    keras = types.ModuleType("keras")
    vars(keras)["__version__"] = version
    if not is_refused:
        refuse_old_keras(keras)
        return
    with pytest.raises(ImportError) as raised:
        refuse_old_keras(keras)
    assert str(raised.value) == (
        f"tfmp needs Keras 3.5 or newer with TensorFlow {tf.__version__}, got Keras {version}: "
        "pip install --upgrade keras."
    )


def test_missing_package_names_its_extra() -> None:
    with pytest.raises(ImportError, match=r"needs the package 'no_such_package'.*its extra, 'tfmp\[examples\]'"):
        require("no_such_package.part", extra="examples")


def test_fault_inside_an_installed_package_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_package.py").write_text("import not_there_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        require("faulty_package", extra="examples")
