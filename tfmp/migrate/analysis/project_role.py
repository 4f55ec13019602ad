"""Determines the role of a script among the scripts of its project."""

from typing import NamedTuple

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import TfVersion, detect_version, is_run, name_in_tensorflow, uses_and_imports

_CHOICES = frozenset(("disable_v2_behavior", "enable_v2_behavior", "disable_eager_execution", "enable_eager_execution"))


class ProjectRole(NamedTuple):
    """The facts about a script that matter to scripts that import it, and to scripts that it imports."""

    version: TfVersion
    needs_behavior: bool  #: True if the script runs only with the behavior of TensorFlow 1.
    settles_behavior: bool  #: True if the script selects a behavior itself, or if R1 inserts that call or asks for it.
    line: int  #: The line of its first import of TensorFlow; 0 if it has none.


def project_role(script: Script) -> ProjectRole:
    """Return the role of a script in its project."""
    detected = script.cached(detect_version)
    is_old = detected.version in (TfVersion.V1, TfVersion.COMPAT_V1)
    names = {name_in_tensorflow(one.name) for one in uses_and_imports(script)}
    settles = not names.isdisjoint(_CHOICES) or (is_old and is_run(script))
    lines = (script.line(one.node) for one in script.imports if one.name.partition(".")[0] == "tensorflow")
    return ProjectRole(detected.version, is_old and detected.graph, settles, next(lines, 0))
