"""Relates the files of a run to each other: TensorFlow versions and findings that depend on several files."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from tfmp.migrate.analysis.project_role import ProjectRole
from tfmp.migrate.analysis.tf_version import TfVersion
from tfmp.migrate.cli.modules import Import
from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits.results import Finding, Level

RULE = "R1"
_ADVICE = "tensorflow.compat.v1.disable_v2_behavior() before all else"
# Files without a version of their own take the version of the files that import them. Other files pass theirs on.
_FOLLOWING = frozenset((None, TfVersion.AMBIGUOUS, TfVersion.NEUTRAL))


class _Edge(NamedTuple):
    """An import of one file by another.

    Attributes:
        target: The number of the imported file.
        line: The line of the import.
    """

    target: int
    line: int


class Project:
    """The files of a run, with the imports between them.

    An import is searched for in the directory of the importing file, then in the directories above. Python finds it
    there if a script is run from one of these directories.

    Args:
        reports: The report of each file.
    """

    def __init__(self, reports: Sequence[FileReport]) -> None:
        self._reports = reports
        self._numbers = {os.path.abspath(report.path): number for number, report in enumerate(reports)}
        self._edges = [list(_edges(report, self._numbers)) for report in reports]
        self._imported = {edge.target for edges in self._edges for edge in edges}
        of_2 = (number for number in self._files() if self._version(number) is TfVersion.V2)
        self._packages_of_2 = {self._package(number) for number in of_2}

    def tf_versions(self) -> dict[int, int]:
        """Return the TensorFlow version, 1 or 2, of files that do not show it themselves, keyed by the files' numbers.

        Such a file takes the version of all files that import it, directly or indirectly, if these agree. A script that
        is run is for TensorFlow 1 if it imports files that run only with the behavior of TensorFlow 1.
        """
        by = {each: self._passed_on(each) for each in TfVersion if each not in _FOLLOWING}
        unclear = (one for one in self._files() if self._version(one) is TfVersion.AMBIGUOUS)
        found: dict[int, int] = {}
        for number in unclear:
            importers = {each for each, reached in by.items() if number in reached}
            if importers == {TfVersion.V1}:
                found[number] = 1
            elif importers == {TfVersion.V2}:
                found[number] = 2
        return found | dict.fromkeys(self._scripts_of_old(), 1)

    def findings(self) -> Iterator[tuple[int, Finding]]:
        """Yield the findings that depend on several files, each with the number of its file.

        A script fails if it is run, imports files that need the behavior of TensorFlow 1, and does not turn that on:
        this is left to do. If no script is given that imports such files, they are a library, which needs no change:
        a note says what its scripts must call. A single file gets no such note.
        """
        left = dict(self._left())
        for number, needing in left.items():
            yield number, self._of_script(number, needing)
        every = list(self._files())
        needing = self._needing(every)
        if not left and needing and len(every) > 1:
            yield needing[0], self._of_library(needing)

    def _left(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the scripts that must turn on TensorFlow 1's behavior for the files they import, with these files."""
        for number in self._files():
            if self._is_script(number):
                needing = [one for one in self._needing(self._reached([number])) if one != number]
                if needing:
                    yield number, needing

    def _of_script(self, number: int, needing: Sequence[int]) -> Finding:
        """Return the finding for a script that must turn on the behavior of TensorFlow 1."""
        line = next(edge.line for edge in self._edges[number] if self._reached([edge.target]) & {*needing})
        others = f" and {len(needing) - 1} more" if needing[1:] else ""
        message = (
            f"this script is run, and imports {self._reports[needing[0]].path}{others}, which needs the behavior of "
            f"TensorFlow 1, but nothing turns that on: call {_ADVICE}."
        )
        return Finding(RULE, line, Level.FAILS, message)

    def _of_library(self, needing: Sequence[int]) -> Finding:
        """Return the note for files of a library whose scripts must turn on the behavior of TensorFlow 1."""
        role = self._reports[needing[0]].role
        others = f", or {len(needing) - 1} more of TensorFlow 1" if needing[1:] else ""
        message = f"no script given here imports this file{others}: a script that does must call {_ADVICE}."
        return Finding(RULE, role.line if role is not None else 1, Level.NOTE, message)

    def _files(self) -> Iterable[int]:
        return (number for number, report in enumerate(self._reports) if report.module is not None)

    def _version(self, number: int) -> TfVersion | None:
        role = self._reports[number].role
        return role.version if role is not None else None

    def _is_script(self, number: int) -> bool:
        """Tell whether a file is run as a script: it has a main block, or it makes calls and no file imports it."""
        module = self._reports[number].module
        if module is None or module.has_main:
            return module is not None
        # Python cannot run a file with relative imports as a script.
        return module.calls and number not in self._imported and not any(one.level for one in module.imports)

    def _scripts_of_old(self) -> Iterator[int]:
        """Yield the scripts with a main block that import files needing TensorFlow 1's behavior."""
        for number in self._files():
            report, version = self._reports[number], self._version(number)
            has_main = report.module is not None and report.module.has_main
            if has_main and report.role is not None and report.role.line and version in _FOLLOWING:
                needing = self._needing(self._reached([number]))
                if any(self._version(one) is TfVersion.V1 for one in needing):
                    yield number

    def _needing(self, numbers: Collection[int]) -> list[int]:
        """Return the files that need TensorFlow 1's behavior; none if a file selects a behavior or is for version 2."""
        roles = [(number, role) for number in sorted(numbers) if (role := self._reports[number].role) is not None]
        if any(role.settles_behavior or role.version is TfVersion.V2 for _, role in roles):
            return []
        return [number for number, role in roles if role.needs_behavior and not self._is_ported(number, role)]

    def _is_ported(self, number: int, role: ProjectRole) -> bool:
        """Tell whether a file is of a package of TensorFlow 2 that uses tf.compat.v1, as inside an Estimator."""
        return role.version is TfVersion.COMPAT_V1 and self._package(number) in self._packages_of_2

    def _package(self, number: int) -> str:
        """Return the outermost directory around a file that is a package; without a package, the file's directory."""
        directory = os.path.dirname(os.path.abspath(self._reports[number].path))
        while os.path.join(os.path.dirname(directory), "__init__.py") in self._numbers:
            directory = os.path.dirname(directory)
        return directory

    def _passed_on(self, version: TfVersion) -> set[int]:
        """Return the files that files of a version import, directly or through files that do not show a version."""
        starts = [number for number in self._files() if self._version(number) is version]
        targets = [edge.target for start in starts for edge in self._edges[start]]
        return self._reached(targets, only_following=True)

    def _reached(self, starts: Iterable[int], *, only_following: bool = False) -> set[int]:
        """Return files and all files that they import, directly or indirectly."""
        found: set[int] = set()
        stack = list(starts)
        while stack:
            number = stack.pop()
            if number in found or (only_following and self._version(number) not in _FOLLOWING):
                continue
            found.add(number)
            stack += [edge.target for edge in self._edges[number]]
        return found


def _edges(report: FileReport, numbers: dict[str, int]) -> Iterator[_Edge]:
    directory = os.path.dirname(os.path.abspath(report.path))
    for one in report.module.imports if report.module is not None else ():
        for target in _targets(directory, one, numbers):
            yield _Edge(target, one.line)


def _targets(directory: str, one: Import, numbers: dict[str, int]) -> list[int]:
    """Return the files that an import may load, from the nearest directory that has one."""
    for _ in range(one.level - 1):
        directory = os.path.dirname(directory)
    while True:
        paths = [os.path.join(directory, *name.split(".")) for name in one.names]
        files = (file for path in paths for file in (f"{path}.py", os.path.join(path, "__init__.py")))
        found = [numbers[file] for file in files if file in numbers]
        above = os.path.dirname(directory)
        if found or one.level or above == directory:
            return found
        directory = above
