"""What `import tfmp` gives, what it costs, and what it says when TensorFlow is missing or old."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import tensorflow as tf

import tfmp
from tfmp.optional import refuse_old_keras, require


def _python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    root = Path(tfmp.__file__).parent.parent
    code = f"import sys; sys.path[:0] = {[str(entry) for entry in (*path, root)]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_every_public_name_is_there() -> None:
    for name in tfmp.__all__:
        assert getattr(tfmp, name) is not None
    assert set(tfmp.__all__) <= set(dir(tfmp))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tfmp' has no attribute 'LossScaler'"):
        _ = tfmp.LossScaler


def test_import_alone_loads_no_tensorflow() -> None:
    done = _python("import tfmp, tfmp.bert; assert 'tensorflow' not in sys.modules and 'numpy' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_wrapping_a_tf1_optimizer_loads_no_keras_and_public_names_nothing_else_that_is_heavy() -> None:
    done = _python(
        "import tensorflow as tf\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import tfmp\n"
        "tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), tfmp.FixedLossScaleManager(8))\n"
        "assert 'keras' in before or 'keras' not in sys.modules\n"
        "assert 'tfmp.optimizers.keras3' not in sys.modules\n"
        "for name in tfmp.__all__: getattr(tfmp, name)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))"
    )
    assert done.stdout.strip() == "['tfmp']", done.stderr


@pytest.mark.parametrize("content", ["", "__version__ = '3.15.1'\n", "__version__ = '1.2'\nsaving = None\n"])
def test_package_that_only_has_the_name_of_keras_is_imported_as_ever(tmp_path: Path, content: str) -> None:
    (tmp_path / "keras.py").write_text(content)
    done = _python("import tfmp, keras; print(keras.__file__)", tmp_path)
    assert done.stdout.strip() == str(tmp_path / "keras.py"), done.stderr


def test_missing_tensorflow_is_one_clear_error() -> None:
    # Python without what pip installed.
    done = _python(
        "sys.path[:] = [entry for entry in sys.path if 'site-packages' not in entry]\n"
        "import tfmp\n"
        "tfmp.LossScaleOptimizer"
    )
    assert "ImportError: tfmp needs TensorFlow 2.15 or newer, which is not installed: pip install" in done.stderr


def test_old_tensorflow_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("__version__ = '2.9.3'\n")
    done = _python("import tfmp\ntfmp.LossScaleOptimizer", tmp_path)
    assert "ImportError: tfmp needs TensorFlow 2.15 or newer, got 2.9.3: upgrade" in done.stderr


def test_remains_of_a_tensorflow_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    done = _python(
        "sys.path[:] = [entry for entry in sys.path if 'site-packages' not in entry]\n"
        "from tfmp import LossScaleOptimizer",
        tmp_path,
    )
    assert (
        "ImportError: tfmp found an incomplete installation of TensorFlow: pip install --force-reinstall" in done.stderr
    )


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
