"""What `python -m tfmp` says of the installed versions and of GPUs, and that a missing or old package is an error.

The machine that runs the tests need not have a GPU.
"""

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from benchmarks.harness import report
from tfmp import __main__ as command
from tfmp import environment, gpus
from tfmp.environment import refuse_old_keras, require

_PAGE = Path(__file__).parent.parent / "docs" / "reference" / "versions.md"
_GOOD = {"Python": "3.11.7", "tensorflow-cpu": "2.21.0", "keras": "3.15.1", "tf_keras": "2.21.0", "numpy": "2.4.6"}


def _printed_by_the_command(before: str = "", *path: Path) -> list[str]:
    """Run the command in a new process, after some code, and return its lines."""
    paths = [*map(str, path), str(Path(tfmp.__file__).parent.parent)]
    code = f"import runpy, sys; sys.path[:0] = {paths!r}\n{before}\nrunpy.run_module('tfmp', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_command_prints_the_versions_before_tensorflow_is_loaded_and_then_the_gpus() -> None:
    # A TensorFlow that ends the process leaves them on the screen.
    before = (
        "from tfmp import gpus\nfound = gpus.build\ngpus.build = lambda: print('tensorflow' in sys.modules) or found()"
    )
    lines = _printed_by_the_command(before)
    loaded = lines.index("False")
    assert lines[0].split() == ["tfmp", tfmp.__version__]
    assert any(line.startswith("keras ") for line in lines[:loaded])
    assert lines[loaded - 1].startswith("platform ")
    assert lines[-3].startswith("TensorFlow's build    with")
    assert lines[-2].startswith("GPU ")
    assert lines[-1] == "These versions are supported."


def test_command_prints_the_versions_where_tensorflow_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise OSError('libcudart.so.12 is missing')")
    *lines, gpu, verdict = _printed_by_the_command("", tmp_path)
    assert any(line.startswith("keras ") for line in lines)
    assert gpu == "GPU                   not known, because TensorFlow raises OSError: libcudart.so.12 is missing"
    assert verdict == "These versions are supported."


_INSTALL = "pip install tensorflow, or tensorflow-cpu."
_NOT_WITH = "is not supported with TensorFlow"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"tf_keras": None, "keras": None}, None),
        ({"tensorflow-cpu": None}, f"TensorFlow is not installed: {_INSTALL} tfmp.migrate does not need it."),
        ({"tensorflow-cpu": "2.14.0"}, "TensorFlow 2.14.0 is not supported: use 2.15 to 2.21."),
        ({"tensorflow-cpu": "2.22.0rc1"}, "TensorFlow 2.22.0rc1 is not supported: use 2.15 to 2.21."),
        ({"Python": "3.9.18"}, "Python 3.9.18 is not supported with TensorFlow 2.21: use 3.10 to 3.13."),
        ({"keras": "3.11.0"}, "keras 3.11.0 is not supported with TensorFlow 2.21: use 3.12 to 3.15."),
        ({"tf_keras": "2.20.1"}, "tf_keras 2.20.1 is not supported with TensorFlow 2.21: use 2.21."),
        ({"horovod": "0.28.1"}, f"horovod 0.28.1 {_NOT_WITH} 2.21: use 0.28.1 with TensorFlow 2.15."),
    ],
)
def test_each_version_that_is_not_supported_is_named(changed: dict[str, str | None], problem: str | None) -> None:
    versions = {name: version for name, version in {**_GOOD, **changed}.items() if version is not None}
    assert environment.problems(versions) == ([] if problem is None else [problem])


def test_with_tensorflow_2_15_keras_2_is_supported_and_tf_keras_is_not() -> None:
    versions = {"Python": "3.10.13", "tensorflow": "2.15.1", "keras": "2.15.0", "horovod": "0.28.1"}
    assert environment.problems(versions) == []
    (problem,) = environment.problems({**versions, "tf_keras": "2.15.0"})
    assert problem == "tf_keras 2.15.0 is not supported with TensorFlow 2.15: use Keras 2.15, which is tf.keras."


def test_the_page_has_the_same_table() -> None:
    rows = re.findall(r"^\| (2\.\d+) \| ([^|]*) \| ([^|]*) \|([^|]*)\|", _PAGE.read_text("utf-8"), re.MULTILINE)

    def bounds(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ends = [tuple(map(int, each.split("."))) for each in re.findall(r"\d+\.\d+", text)]
        return ends[0], ends[-1]

    listed = {
        bounds(tensorflow)[0]: (bounds(python), bounds(keras), bounds(tf_keras)[0] if tf_keras.strip() else None)
        for tensorflow, python, keras, tf_keras in rows
    }
    assert listed == {
        tensorflow: (python, keras, tensorflow if keras[0] >= (3,) else None)
        for tensorflow, (python, keras) in environment.SUPPORTED.items()
    }


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


_DETAILS: list[dict[str, Any]] = [
    {"device_name": "NVIDIA A100-SXM4-40GB", "compute_capability": (8, 0)},
    {"device_name": "METAL"},
    {},
]
_LINES = ["NVIDIA A100-SXM4-40GB, compute capability 8.0", "METAL", "/physical_device:GPU:2"]


@pytest.fixture
def _three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [types.SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in range(len(_DETAILS))]
    details = {device.name: _DETAILS[number] for number, device in enumerate(devices)}
    monkeypatch.setattr(sys, "argv", ["tfmp"])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: {"GPU": devices}[kind])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details[device.name])


@pytest.mark.usefixtures("_three_gpus")
def test_gpus_are_named_with_what_tensorflow_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpus.descriptions() == _LINES
    command.main()
    printed = capsys.readouterr().out
    assert (
        "GPU 0                 NVIDIA A100-SXM4-40GB, compute capability 8.0\nGPU 1                 METAL\n" in printed
    )
    assert "no GPU is visible" not in printed
    assert report.conditions()["GPUs"] == "; ".join(_LINES)


def test_without_a_gpu_the_command_says_so_and_names_what_hides_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tfmp"])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: [])
    assert "GPUs" not in report.conditions()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    command.main()
    assert "no GPU is visible to TensorFlow (CUDA_VISIBLE_DEVICES='-1')\n" in capsys.readouterr().out
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    command.main()
    printed = capsys.readouterr().out
    assert "no GPU is visible to TensorFlow\n" in printed
    assert f"TensorFlow's build    {gpus.build()}\n" in printed


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}, "with CUDA 12.5.1, cuDNN 9"),
        ({"is_cuda_build": True}, "with CUDA"),
        ({"is_cuda_build": False, "is_rocm_build": True, "rocm_version": "6.0"}, "with ROCm 6.0"),
        ({"is_cuda_build": False, "is_rocm_build": False}, "without CUDA"),
        ({}, "without CUDA"),
    ],
)
def test_build_is_named_with_its_versions(info: dict[str, Any], text: str) -> None:
    assert gpus.build_text(info) == text
