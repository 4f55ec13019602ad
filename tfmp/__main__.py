"""Prints the versions that matter for a report of a fault, and what of the installation is not supported.

python -m tfmp
"""

import platform
import sys

import tfmp
from tfmp.environment import installed_versions, problems


def main() -> int:
    """Print the versions, and return the exit status: 1 if something is not supported."""
    versions = installed_versions()
    named = {"tfmp": tfmp.__version__, **versions, "platform": platform.platform()}
    lines = [f"{name:22}{value}" for name, value in named.items()]
    found = problems(versions)
    lines += [f"not supported: {problem}" for problem in found] or ["These versions are supported."]
    sys.stdout.write("\n".join([*lines, ""]))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
