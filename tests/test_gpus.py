"""What is said of GPUs, of which the machine that runs the tests need not have any."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from benchmarks.harness import report
from tfmp import __main__ as command
from tfmp import gpus

_DETAILS: list[dict[str, Any]] = [
    {"device_name": "NVIDIA A100-SXM4-40GB", "compute_capability": (8, 0)},
    {"device_name": "METAL"},
    {},
]
_LINES = ["NVIDIA A100-SXM4-40GB, compute capability 8.0", "METAL", "/physical_device:GPU:2"]


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tfmp"])


@pytest.fixture
def _three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in range(len(_DETAILS))]
    details = {device.name: _DETAILS[number] for number, device in enumerate(devices)}
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
