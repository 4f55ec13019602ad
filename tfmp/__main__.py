"""Prints the versions that matter for a report of a fault, what of them is not supported, and the GPUs.

python -m tfmp
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Mapping

import tfmp
from tfmp import gpus
from tfmp.environment import installed, installed_versions, problems


def main() -> int:
    """Print the versions and the GPUs, and return the exit status: 1 if something is not supported."""
    argparse.ArgumentParser(
        prog="python -m tfmp",
        description="Prints the installed versions, whether they are supported together, and the GPUs that TensorFlow "
        "sees. The exit status is 1 if something is not supported. To rewrite scripts of TensorFlow 1, run "
        "python -m tfmp.migrate.",
    ).parse_args()
    versions = installed_versions()
    _print({"tfmp": tfmp.__version__, **versions, "platform": platform.platform()})
    # TensorFlow is loaded once the versions are printed, and so are they if it ends the process.
    _print(dict(_of_gpus()))
    found = problems(versions)
    lines = [f"not supported: {problem}" for problem in found] or ["These versions are supported."]
    sys.stdout.write("\n".join([*lines, ""]))
    return 1 if found else 0


def _print(values: Mapping[str, str]) -> None:
    sys.stdout.write("".join(f"{name:22}{value}\n" for name, value in values.items()))
    sys.stdout.flush()


def _of_gpus() -> Iterator[tuple[str, str]]:
    if not installed("tensorflow"):
        return
    # Only what is of no interest is left out: the log says why a GPU is not found.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        build, found = gpus.build(), gpus.descriptions()
    except Exception as error:
        # Whatever is wrong with this TensorFlow, its version is supported or not.
        yield "GPU", f"not known, because TensorFlow raises {type(error).__name__}: {error}"
        return
    yield "TensorFlow's build", build
    yield from ((f"GPU {number}", gpu) for number, gpu in enumerate(found))
    if not found:
        yield "GPU", gpus.none_visible()


if __name__ == "__main__":
    raise SystemExit(main())
