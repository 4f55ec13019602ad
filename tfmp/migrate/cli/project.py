"""Processes the files of a run. Files that do not show their TensorFlow version are judged by the files around them."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfmp.migrate.analysis.project_role import ProjectRole
from tfmp.migrate.analysis.tf_version import TfVersion
from tfmp.migrate.cli.files import Found
from tfmp.migrate.cli.modules import Import, Module, paths_of
from tfmp.migrate.cli.processing import FileReport, Job
from tfmp.migrate.cli.workers import process_all
from tfmp.migrate.edits.results import Finding, Level

RULE = "R1"
_LEFT = (
    "This script is run, and it imports files that work only with the behavior of TensorFlow 1, but nothing turns "
    "that behavior on. With TensorFlow 2 it fails in those files, for example at a placeholder. Begin the script with "
    "`import tensorflow.compat.v1 as tf` and `tf.disable_v2_behavior()`, before its other imports."
)
_LIBRARY = (
    "These files work only with the behavior of TensorFlow 1, and no script that imports them is among the given "
    "files. A script that imports them must first call `tensorflow.compat.v1.disable_v2_behavior()`."
)
_HIDDEN = (
    "TensorFlow comes from another file here, under a name that the rewriter does not follow; names of TensorFlow 1 "
    "may be used through it. Write `import tensorflow.compat.v1 as tf` and tf. before them in this file, and run the "
    "rewriter again."
)
# Files without a version of their own take the version of the files that import them. Other files pass theirs on.
_FOLLOWING = frozenset((TfVersion.AMBIGUOUS, TfVersion.NEUTRAL))
_NO_ROLE = ProjectRole(TfVersion.NEUTRAL, needs_behavior=False, settles_behavior=False, line=0)


def process_run(
    found: Sequence[Found], job: Job, progress: Callable[[], object] = lambda: None
) -> tuple[list[FileReport], bool]:
    """Rewrite files: first those that show their TensorFlow version, then the others by the files around them.

    Returns:
        The reports in the order of the files, and whether an interrupt ended the run: then unfinished files have none.
    """
    first = job._replace(waits=True)
    reports, interrupted = process_all({number: (one, first) for number, one in enumerate(found)}, progress)
    waiting = {number for number, report in reports.items() if job.write and report.changes and report.waits}
    if not interrupted:
        told = Project([*reports.values()]).tf_versions()
        jobs = {number: job._replace(tensorflow=told.get(number)) for number in told}
        tasks = {number: (found[number], jobs.get(number, job)) for number in waiting | told.keys()}
        again, interrupted = process_all(tasks)
        reports |= again
        waiting -= again.keys()
    if interrupted:
        return [report for number, report in reports.items() if number not in waiting], True
    for number, finding in Project([*reports.values()]).findings():
        reports[number] = reports[number]._replace(findings=(*reports[number].findings, finding))
    return [*reports.values()], False


class Project:
    """The files of a run, with the imports between them.

    An import is searched for in the directory of the importing file, then in the directories above. Python finds it
    there if a script is run from one of these directories.
    """

    def __init__(self, reports: Sequence[FileReport]) -> None:
        self._paths = [os.path.abspath(report.path) for report in reports]
        self._known = {*self._paths}
        self._numbers = {path: number for number, path in enumerate(self._paths)}
        self._reports = reports
        self._modules = [report.module or Module() for report in reports]
        self._roles = [report.role or _NO_ROLE for report in reports]
        # The files that were processed, and for each of them the numbers of the imported files with the lines.
        self._files = [number for number, report in enumerate(reports) if report.module is not None]
        self._edges = list(_edges(self._paths, self._modules))
        self._imported = {target for edges in self._edges for target, _ in edges}
        self._packages_of_2 = {self._package(number) for number in self._files_of(TfVersion.V2)}

    def tf_versions(self) -> dict[int, int]:
        """Return the TensorFlow version, 1 or 2, of files that do not show it themselves, by the files' numbers.

        Such a file takes the version of all files that import it, directly or indirectly, if these agree. A script that
        is run is for TensorFlow 1 if it imports files that run only with the behavior of TensorFlow 1.
        """
        by = {version: self._passed_on(version) for version in TfVersion if version not in _FOLLOWING}
        found: dict[int, int] = {}
        for number in self._files_of(TfVersion.AMBIGUOUS):
            importers = [version for version, reached in by.items() if number in reached]
            if importers in ([TfVersion.V1], [TfVersion.V2]):
                found[number] = 1 if TfVersion.V1 in importers else 2
        return found | dict.fromkeys(filter(self._is_script_of_old, self._files), 1)

    def findings(self) -> Iterator[tuple[int, Finding]]:
        """Yield the findings that depend on several files, each with the number of its file.

        A script fails if it is run, imports files that need the behavior of TensorFlow 1, and does not turn that on. If
        no given script imports such files, they are a library, which needs no change: a note says what its scripts must
        call. A single file gets no such note.
        """
        is_library = len(self._files) > 1
        for number in filter(self._is_script, self._files):
            needing = [one for one in self._needing(self._reached([number])) if one != number]
            if needing:
                is_library = False
                line = next(line for target, line in self._edges[number] if self._reached([target]) & {*needing})
                detail = f"It imports {self._reports[needing[0]].path}{_others(needing)}."
                yield number, Finding(RULE, line, Level.FAILS, _LEFT, detail)
        yield from self._hidden()
        needing = self._needing(self._files) if is_library else []
        if needing:
            detail = f"This file{_others(needing)}." if needing[1:] else ""
            yield needing[0], Finding(RULE, self._roles[needing[0]].line, Level.NOTE, _LIBRARY, detail)

    def _hidden(self) -> Iterator[tuple[int, Finding]]:
        """Yield a finding for each import of TensorFlow, under a name of their own, from files that stay as they are.

        A file of TensorFlow 1 imports `tensorflow.compat.v1` after the rewrite, which has the names.
        """
        given = {word for module in self._modules for word in module.tensorflow}
        for number in self._files:
            module = self._modules[number]
            # The star, or the last word of `base.T` for `from base import T`.
            words = ((one, one.names[0].rpartition(".")[2]) for one in module.imports if len(one.names) > 1)
            mine = [(one, module.starred if word == "*" else {word}) for one, word in words if word in given | {"*"}]
            for one, read in mine if given and self._roles[number].version is not TfVersion.V2 else ():
                for target in _targets(os.path.dirname(self._paths[number]), one, self._numbers):
                    is_left = self._roles[target].version in _FOLLOWING
                    taken = self._modules[target].tensorflow & read if is_left else frozenset()
                    if taken:
                        detail = f"It is {', '.join(sorted(taken))} of {self._reports[target].path}."
                        yield number, Finding("R4", one.line, Level.FAILS, _HIDDEN, detail)

    def _files_of(self, version: TfVersion) -> list[int]:
        return [number for number in self._files if self._roles[number].version is version]

    def _is_script(self, number: int) -> bool:
        """Tell whether a file is run as a script: it has a main block, or it makes calls and no file imports it."""
        module = self._modules[number]
        # Python cannot run a file with relative imports as a script.
        is_alone = number not in self._imported and not any(one.level for one in module.imports)
        return module.has_main or (module.calls and is_alone)

    def _is_script_of_old(self, number: int) -> bool:
        """Tell whether a file has a main block and imports files needing TensorFlow 1's behavior."""
        role = self._roles[number]
        if not self._modules[number].has_main or not role.line or role.version not in _FOLLOWING:
            return False
        return any(self._roles[one].version is TfVersion.V1 for one in self._needing(self._reached([number])))

    def _needing(self, numbers: Iterable[int]) -> list[int]:
        """Return the files that need TensorFlow 1's behavior; none if a file selects a behavior or is for version 2."""
        roles = {number: self._roles[number] for number in sorted(numbers)}
        if any(role.settles_behavior or role.version is TfVersion.V2 for role in roles.values()):
            return []
        return [number for number, role in roles.items() if role.needs_behavior and not self._is_ported(number)]

    def _is_ported(self, number: int) -> bool:
        """Tell whether a file is of a package of TensorFlow 2 that uses tf.compat.v1, as inside an Estimator."""
        return self._roles[number].version is TfVersion.COMPAT_V1 and self._package(number) in self._packages_of_2

    def _package(self, number: int) -> str:
        """Return the outermost directory around a file that is a package; without a package, the file's directory."""
        directory = os.path.dirname(self._paths[number])
        while os.path.join(os.path.dirname(directory), "__init__.py") in self._known:
            directory = os.path.dirname(directory)
        return directory

    def _passed_on(self, version: TfVersion) -> set[int]:
        """Return the files that files of a version import, directly or through files that do not show a version."""
        imported = (target for start in self._files_of(version) for target, _ in self._edges[start])
        return self._reached(imported, only_following=True)

    def _reached(self, starts: Iterable[int], *, only_following: bool = False) -> set[int]:
        """Return files and all files that they import, directly or indirectly."""
        found: set[int] = set()
        stack = list(starts)
        while stack:
            number = stack.pop()
            if number not in found and (not only_following or self._roles[number].version in _FOLLOWING):
                found.add(number)
                stack += [target for target, _ in self._edges[number]]
        return found


def _others(files: Sequence[int]) -> str:
    return f" and {len(files) - 1} more" if files[1:] else ""


def _edges(paths: Sequence[str], modules: Sequence[Module]) -> Iterator[list[tuple[int, int]]]:
    """Yield for each file the numbers of the files that it imports, with the lines of the imports."""
    numbers = {path: number for number, path in enumerate(paths)}
    # Most imports are of installed packages: no file or directory of the run has such a name.
    parts = {part.removesuffix(".py") for path in paths for part in path.split(os.sep)}
    for path, module in zip(paths, modules, strict=True):
        own = [one for one in module.imports if one.level or one.names[0].partition(".")[0] in parts]
        yield [(target, one.line) for one in own for target in _targets(os.path.dirname(path), one, numbers)]


def _targets(directory: str, one: Import, numbers: dict[str, int]) -> list[int]:
    """Return the files that an import may load, from the nearest directory that has one."""
    return [numbers[path] for path in paths_of(one, directory, numbers.__contains__)]
