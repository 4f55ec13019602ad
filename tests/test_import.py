"""`import tfmp` defines the public names, loads little, and raises clear errors if TensorFlow is missing or old."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfmp
from tfmp.moved_names import MOVED


def _python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    root = Path(tfmp.__file__).parent.parent
    code = f"import sys; sys.path[:0] = {[str(entry) for entry in (*path, root)]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_every_public_name_is_there() -> None:
    for name in tfmp.__all__:
        assert getattr(tfmp, name) is not None
    assert set(tfmp.__all__) <= set(dir(tfmp))


@pytest.mark.parametrize("package", ["bert", "checkpoints", "grad_scaler", "mixed_precision", "npu", "ranges"])
def test_packages_of_names_are_attributes(package: str) -> None:
    code = f"import tfmp; print(tfmp.{package}.__name__, 'tensorflow' in sys.modules, '{package}' in dir(tfmp))"
    done = _python(code)
    assert done.stdout == f"tfmp.{package} False True\n", done.stderr
    names = getattr(tfmp, package)
    for name in names.__all__:
        assert getattr(names, name) is not None
    assert set(names.__all__) <= set(dir(names))
    assert package not in tfmp.__all__


@pytest.mark.parametrize("name", MOVED)
def test_moved_names_still_work_and_say_where_they_are(name: str) -> None:
    package, new_name = MOVED[name]
    with pytest.warns(DeprecationWarning, match=rf"tfmp\.{name} is deprecated: write tfmp\.{package}\.{new_name}\.$"):
        moved = getattr(tfmp, name)
    assert moved is getattr(getattr(tfmp, package), new_name)
    assert name not in dir(tfmp)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tfmp' has no attribute 'LossScaler'"):
        _ = tfmp.LossScaler


def test_import_alone_loads_no_tensorflow() -> None:
    done = _python(
        "import tfmp, tfmp.bert, tfmp.ranges; assert 'tensorflow' not in sys.modules and 'numpy' not in sys.modules"
    )
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


def test_missing_tensorflow_is_one_clear_error() -> None:
    # Python without the packages that pip installed.
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
