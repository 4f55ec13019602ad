"""What TensorFlow and the NVIDIA driver say of the machine, asked in a process of its own."""

import concurrent.futures
import importlib.metadata
import multiprocessing
import os
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

_QUERY = "name,driver_version,memory.total,pcie.link.gen.current,power.limit"
#: The beginnings of the names of variables that change what TensorFlow does on a GPU. Others that begin alike are left
#: out, because they may hold secrets: those of Terraform begin with TF_ too.
_SETTINGS = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS"),
    *("TF_CPP_", "TF_CUDNN_", "TF_DETERMINISTIC_", "TF_ENABLE_", "TF_FORCE_GPU_", "TF_GPU_", "TF_XLA_"),
)


class Machine(NamedTuple):
    """The machine of a report.

    Attributes:
        gpus: A line for each GPU that TensorFlow sees.
        rows: Further facts, by their names.
    """

    gpus: list[str]
    rows: Mapping[str, str]

    @property
    def title(self) -> str:
        """The GPUs in a few words."""
        names = [gpu.partition(",")[0] for gpu in self.gpus]
        return " and ".join(names) if names else "a machine on which TensorFlow sees no GPU"


def look() -> Machine:
    """Ask TensorFlow, in a process that ends: the memory of the GPU stays free for the parts of the report."""
    spawning = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawning) as process:
            gpus, rows = process.submit(_by_tensorflow).result()
    except Exception as error:
        # The parts will say more of a TensorFlow that cannot be imported.
        gpus, rows = [], {"TensorFlow": f"raises {type(error).__name__}: {error}"}
    return Machine(gpus, {**rows, "driver": _by_driver(), **_installed()})


def _by_tensorflow() -> tuple[list[str], dict[str, str]]:
    # What TensorFlow logs is in the outputs of the parts.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import tensorflow as tf

    from benchmarks.harness import report
    from tfmp import gpus

    found = gpus.descriptions()
    rows = {f"GPU {number}": gpu for number, gpu in enumerate(found)} or {"GPU": gpus.none_visible()}
    rows["TensorFlow"] = f"{tf.__version__}, built {gpus.build()}"
    rows["build of TensorFlow"] = ", ".join(f"{name} {value}" for name, value in tf.sysconfig.get_build_info().items())
    rows["machine"] = report.conditions()["machine"]
    return found, rows


def _by_driver() -> str:
    """Return what the tool of the driver says, with the memory of the GPUs, of which TensorFlow knows nothing."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError:
        return "not known: there is no nvidia-smi"
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return f"{'; '.join(done.stdout.strip().splitlines())} ({_QUERY})"


def _installed() -> dict[str, str]:
    names = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    libraries = [f"{name} {names[name]}" for name in sorted(names) if name.startswith("nvidia-")]
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)]
    return {"packages of NVIDIA": ", ".join(libraries) or "none", "environment": ", ".join(settings) or "nothing set"}
