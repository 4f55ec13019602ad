"""`import tfmp` defines the public names, loads little, and raises clear errors if TensorFlow is missing or old."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfmp


def _python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    root = Path(tfmp.__file__).parent.parent
    code = f"import sys; sys.path[:0] = {[str(entry) for entry in (*path, root)]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_every_public_name_is_there() -> None:
    for name in tfmp.__all__:
        assert getattr(tfmp, name) is not None
    assert set(tfmp.__all__) <= set(dir(tfmp))


_PACKAGES = ("bert", "checkpoints", "grad_scaler", "mixed_precision", "npu", "ranges")


def test_packages_of_names_are_attributes_and_load_no_tensorflow() -> None:
    code = "".join(f"print(tfmp.{each}.__name__, '{each}' in dir(tfmp)); " for each in _PACKAGES)
    done = _python(f"import tfmp; {code}print('tensorflow' in sys.modules, 'numpy' in sys.modules)")
    assert done.stdout == "".join(f"tfmp.{each} True\n" for each in _PACKAGES) + "False False\n", done.stderr
    for package in _PACKAGES:
        names = getattr(tfmp, package)
        assert [name for name in names.__all__ if getattr(names, name) is None] == []
        assert set(names.__all__) <= set(dir(names))
        assert package not in tfmp.__all__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tfmp' has no attribute 'LossScaler'"):
        _ = tfmp.LossScaler


def test_wrapping_a_tf1_optimizer_loads_no_keras_and_public_names_nothing_else_that_is_heavy() -> None:
    done = _python(
        "import tensorflow as tf\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import tfmp\n"
        "tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), tfmp.FixedLossScaleManager(8))\n"
        "assert 'keras' in before or 'keras' not in sys.modules\n"
        "assert 'tfmp.hosts.keras.keras3' not in sys.modules\n"
        "for name in tfmp.__all__: getattr(tfmp, name)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))"
    )
    assert done.stdout.strip() == "['tfmp']", done.stderr


# Python without the packages that pip installed.
_WITHOUT = "sys.path[:] = [entry for entry in sys.path if 'site-packages' not in entry]\n"


@pytest.mark.parametrize(
    ("before", "file", "said"),
    [
        (_WITHOUT, "none.py", "tfmp needs TensorFlow 2.15 or newer, which is not installed: pip"),
        ("", "tensorflow.py", "tfmp needs TensorFlow 2.15 or newer, got 2.9.3: upgrade"),
        (
            _WITHOUT,
            "tensorflow/remains.txt",
            "tfmp found an incomplete installation of TensorFlow: pip install -",
        ),
    ],
    ids=["missing", "old", "remains"],
)
def test_tensorflow_that_is_missing_or_old_is_one_clear_error(
    before: str, file: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("__version__ = '2.9.3'\n")
    done = _python(f"{before}from tfmp import LossScaleOptimizer", tmp_path)
    assert f"ImportError: {said}" in done.stderr


@pytest.mark.parametrize("content", ["", "__version__ = '3.15.1'\n", "__version__ = '1.2'\nsaving = None\n"])
def test_package_that_only_has_the_name_of_keras_is_imported_as_ever(tmp_path: Path, content: str) -> None:
    (tmp_path / "keras.py").write_text(content)
    done = _python("import tfmp, keras; print(keras.__file__)", tmp_path)
    assert done.stdout.strip() == str(tmp_path / "keras.py"), done.stderr
