"""Rewrites all files of a run. Files that do not show their TensorFlow version are judged by the files around them."""

from collections.abc import Callable, Mapping, Sequence

from tfmp.migrate.cli import files
from tfmp.migrate.cli.processing import FileReport, Job
from tfmp.migrate.cli.project import Project
from tfmp.migrate.cli.workers import Outcome, process_all


def process_run(found: Sequence[files.Found], job: Job, progress: Callable[[], object] = lambda: None) -> Outcome:
    """Rewrite files: first those that show their TensorFlow version, then the others by the files around them.

    Args:
        found: The files to rewrite.
        job: The work to do on each file.
        progress: Called once for each file, after its first pass.

    Returns:
        The report of each file, with the findings that depend on other files.

    Example:
        >>> process_run([], Job())
        Outcome(reports=[], interrupted=False)
    """
    reports, interrupted = process_all(found, job._replace(waits=True), progress)
    waiting = {number for number, report in enumerate(reports) if job.write and report.changes and report.waits}
    if not interrupted:
        told = Project(reports).tf_versions()
        again, interrupted = _again(reports, {**dict.fromkeys(waiting), **told}, job)
        reports = [again.get(number, report) for number, report in enumerate(reports)]
        waiting -= again.keys()
    if interrupted:
        return Outcome([report for number, report in enumerate(reports) if number not in waiting], interrupted)
    for number, finding in Project(reports).findings():
        reports[number] = reports[number]._replace(findings=(*reports[number].findings, finding))
    return Outcome(reports, interrupted)


def _again(
    reports: Sequence[FileReport], generations: Mapping[int, int | None], job: Job
) -> tuple[dict[int, FileReport], bool]:
    """Process files again with their known TensorFlow versions; return the reports, and whether an interrupt came."""
    done: dict[int, FileReport] = {}
    for tensorflow in (1, 2, None):
        numbers = [number for number in sorted(generations) if generations[number] == tensorflow]
        paths = [files.Found(reports[number].path) for number in numbers]
        outcome = process_all(paths, job._replace(options=job.options._replace(tensorflow=tensorflow)))
        by_path = {report.path: report for report in outcome.reports}
        done |= {number: by_path[reports[number].path] for number in numbers if reports[number].path in by_path}
        if outcome.interrupted:
            return done, True
    return done, False
