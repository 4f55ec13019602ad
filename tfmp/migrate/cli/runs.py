"""Rewrites all files of a run. Files that do not show their TensorFlow version are judged by the files around them."""

from collections.abc import Callable, Sequence

from tfmp.migrate.cli import files
from tfmp.migrate.cli.processing import FileReport, Job
from tfmp.migrate.cli.project import Project
from tfmp.migrate.cli.workers import process_all


def process_run(
    found: Sequence[files.Found], job: Job, progress: Callable[[], object] = lambda: None
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
        jobs = {number: job._replace(options=job.options._replace(tensorflow=told.get(number))) for number in told}
        tasks = {number: (found[number], jobs.get(number, job)) for number in waiting | told.keys()}
        again, interrupted = process_all(tasks)
        reports |= again
        waiting -= again.keys()
    if interrupted:
        return [report for number, report in reports.items() if number not in waiting], True
    for number, finding in Project([*reports.values()]).findings():
        reports[number] = reports[number]._replace(findings=(*reports[number].findings, finding))
    return [*reports.values()], False
