"""The GPUs that TensorFlow sees, as text for the report of a fault or of a measurement."""

import importlib
import os
from collections.abc import Mapping
from typing import Any

#: The platforms for which TensorFlow is built, with the names of their versions in what it says of its build.
_PLATFORMS = {
    "CUDA": ("is_cuda_build", {"CUDA": "cuda_version", "cuDNN": "cudnn_version"}),
    "ROCm": ("is_rocm_build", {"ROCm": "rocm_version"}),
}


def descriptions() -> list[str]:
    """Return a line for each GPU that this process may use, such as `NVIDIA H100 PCIe, compute capability 9.0`.

    TensorFlow is imported. It does not set up its devices, so that they can still be configured.
    """
    config = importlib.import_module("tensorflow").config
    return [
        _description(config.experimental.get_device_details(gpu), gpu.name) for gpu in config.get_visible_devices("GPU")
    ]


def none_visible() -> str:
    """Return that there is no GPU, with the setting that hides GPUs if there is one."""
    hidden_by = "CUDA_VISIBLE_DEVICES"
    why = f" ({hidden_by}={os.environ[hidden_by]!r})" if hidden_by in os.environ else ""
    return f"no GPU is visible to TensorFlow{why}"


def build() -> str:
    """Return for which kind of GPUs TensorFlow was built, such as `with CUDA 12.5.1, cuDNN 9`. It is imported."""
    return build_text(importlib.import_module("tensorflow").sysconfig.get_build_info())


def build_text(info: Mapping[str, Any]) -> str:
    """Return what `tf.sysconfig.get_build_info` says as a few words, such as `without CUDA`."""
    for platform, (is_built, versions) in _PLATFORMS.items():
        if info.get(is_built):
            known = [f"{name} {info[key]}" for name, key in versions.items() if key in info]
            return f"with {', '.join(known or [platform])}"
    return "without CUDA"


def _description(details: Mapping[str, Any], device: str) -> str:
    capability = details.get("compute_capability")
    words = [details.get("device_name", device)]
    # Devices of other makers, such as Apple's, have none.
    if capability is not None:
        words.append("compute capability " + ".".join(map(str, capability)))
    return ", ".join(words)
