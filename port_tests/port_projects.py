"""Migrates projects of TensorFlow 1, then trains a small model of each at level O1 and in float32.

    PYTHONPATH=. python port_tests/port_projects.py --bert DIR --albert DIR ... --json projects.json

DIR is a checkout of the project. `python -m tfmp.migrate --write` rewrites a copy of it. This copy gets only the edits
by which the project runs at all ("own"), and is trained in float32. A copy of it also gets the edits by which the
project scales its loss, and is trained at O1 and at O0. All edits are in `port_projects_sources.py`.

Each training has a process of its own, and applies 20 steps of the project's own model and optimizer. The loss scale
begins so high that the first steps overflow. A project works if its own copy trains, if the skipped steps changed
neither weights nor slots, if the matrix products at O1 are in float16, and if the losses at O1 differ from those at O0
by less than a bound. This needs TensorFlow 2.15, the last version with tf.estimator and tf.layers.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from migrations import Migration, copy_checkout, migrate
from port_projects_sources import PROJECTS, Project, edit
from processes import last_lines, run

from benchmarks.harness import report

_TRAINING = Path(__file__).with_name("port_projects_training.py")


class Training(NamedTuple):
    """The result of a training.

    Attributes:
        failure: The reason why the process failed; empty if it did not.
        losses: The losses of the steps that were applied.
        skipped: The losses of the steps that were skipped.
        changed_by_skipped: The names of the variables that skipped steps changed, except those of the loss scale.
        products: The type of each matrix product of the graph.
    """

    failure: str
    losses: Sequence[float] = ()
    skipped: Sequence[float] = ()
    changed_by_skipped: Sequence[str] = ()
    products: Sequence[str] = ()


class Port(NamedTuple):
    """The port of a project.

    Attributes:
        migration: The results of the migration.
        own: The training of the project as it was migrated, in float32.
        half: The training at O1.
        single: The same training at O0.
        unheeded: The training at O1 without heeding the note that the project must heed; None if there is none.
    """

    migration: Migration
    own: Training
    half: Training
    single: Training
    unheeded: Training | None = None

    @property
    def difference(self) -> float:
        """The largest relative difference between a loss at O1 and the same at O0; NaN if one of them is NaN."""
        half, single = map(np.asarray, (self.half.losses, self.single.losses))
        return float(np.max(np.abs(half / single - 1))) if 0 < len(half) == len(single) else math.inf


def main(argv: Sequence[str] | None = None) -> int:
    """Migrate, train and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 0 if all projects work, or if none is given; 1 if one does not; 2 if one cannot be migrated.
    """
    asked = _parser().parse_args(argv)
    checkouts = [(project, path) for project in PROJECTS if (path := getattr(asked, project.training)) is not None]
    skipped = _reason_to_skip(checkouts)
    if skipped:
        print(f"port_projects: skipped: {skipped}")
        return 0
    conditions = report.conditions()
    print(report.lines(conditions), flush=True)
    ports: dict[str, Port] = {}
    with tempfile.TemporaryDirectory() as directory:
        for project, path in checkouts:
            try:
                ports[project.name] = port(project, path, Path(directory) / project.training, asked)
            except (RuntimeError, ValueError) as error:
                print(f"port_projects: error: {error}", file=sys.stderr)
                return 2
    problems = {project.name: problem(project, ports[project.name]) for project, _ in checkouts}
    print(f"\n{table(ports, problems)}")
    figures = {name: {**_figures(each), "problem": problems[name]} for name, each in ports.items()}
    report.write_json(asked.json, {"conditions": conditions, "figures": figures})
    return int(any(problems.values()))


def port(project: Project, checkout: Path, directory: Path, asked: argparse.Namespace) -> Port:
    """Migrate copies of a checkout, and train them.

    Args:
        project: The project.
        checkout: The checkout of it.
        directory: A directory for the copies, which does not exist yet.
        asked: The arguments of the command.

    Raises:
        RuntimeError: The migration failed.
        ValueError: The checkout does not have the code that is edited.
    """
    # ALBERT imports its modules from a package, whose name is that of the checkout's directory.
    own, scaled = (directory / kind / project.training for kind in ("own", "scaled"))
    copy_checkout(checkout, own)
    migration = migrate(own)
    edit(own, project.to_run)
    copy_checkout(own, scaled)
    edit(scaled, project.to_scale)
    print(f"\n{project.name}: migrated\n" + "\n".join(migration.messages), flush=True)
    with ThreadPoolExecutor(2) as threads:
        ours = threads.submit(_train, project, own, "O0", asked, 0)
        half = threads.submit(_train, project, scaled, "O1", asked, 0).result()
        # Random ops draw the same numbers in both trainings if both run equally often.
        single = threads.submit(_train, project, scaled, "O0", asked, len(half.skipped))
        unheeded = threads.submit(_train, project, own, "O1", asked, 0).result() if project.noted else None
        return Port(migration, ours.result(), half, single.result(), unheeded)


def problem(project: Project, port: Port) -> str:
    """Return the reason why a project does not work; an empty string if it works.

    Args:
        project: The project.
        port: The port of it.

    Examples:
        >>> failed = Training("ImportError: six")
        >>> problem(PROJECTS[0], Port(None, failed, failed, failed))
        'the own training: ImportError: six'
    """
    trainings = {"own": port.own, "O1": port.half, "O0": port.single}
    failed = (f"the {name} training: {why}" for name, each in trainings.items() if (why := _failure(each)))
    checks = {
        f"skipped steps changed {', '.join(sorted(set(port.half.changed_by_skipped)))}": port.half.changed_by_skipped,
        "no step overflowed": not port.half.skipped,
        "a matrix product at O1 is not in float16": set(port.half.products) != {"float16"},
        f"the losses differ by {port.difference:.1e}": not port.difference <= project.bound,
        f"{project.noted} notes nothing": project.noted and not port.migration.notes[project.noted],
        "the losses at O1 are finite, although a note was not followed": _is_finite(port.unheeded),
    }
    return next(failed, "") or next((text for text, found in checks.items() if found), "")


def table(ports: Mapping[str, Port], problems: Mapping[str, str]) -> str:
    """Return the ports as a Markdown table.

    Args:
        ports: The ports, by the names of their projects.
        problems: For each project, the reason why it does not work.
    """
    header = ["project", "rewritten: files, places", "left", "notes", "losses", "overflows", "difference", "works"]
    return report.table(header, [[name, *_cells(each), problems[name] or "yes"] for name, each in ports.items()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for project in PROJECTS:
        option = f"--{project.training.replace('_', '-')}"
        parser.add_argument(option, type=_checkout_of(project), metavar="DIR", help=f"a checkout of {project.name}")
    parser.add_argument("--steps", type=int, default=20, help="applied steps of a training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=240, help="seconds until a training is ended (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


def _checkout_of(project: Project) -> Any:
    def checkout(text: str) -> Path:
        if not (Path(text) / project.script).is_file():
            raise argparse.ArgumentTypeError(f"{text} has no {project.script}: name a checkout of {project.name}.")
        return Path(text)

    return checkout


def _reason_to_skip(checkouts: Sequence[tuple[Project, Path]]) -> str:
    if not checkouts:
        return "no checkout is given: name one by --bert DIR, or by the option of another project."
    if not hasattr(tf, "estimator"):
        return f"the projects need tf.estimator, which TensorFlow {tf.__version__} has not: use TensorFlow 2.15."
    return ""


def _train(project: Project, copy: Path, level: str, asked: argparse.Namespace, idle: int) -> Training:
    place = copy.parent / level
    place.mkdir()
    result, log = place / "result.json", place / "log.txt"
    command = [sys.executable, str(_TRAINING), project.training, level, "--result", str(result)]
    command += [f"--{name}={value}" for name, value in (("steps", asked.steps), ("seed", asked.seed), ("idle", idle))]
    imports_from = copy.parent / project.imports_from.format(copy.name)
    failure = run(command, imports_from, log, [imports_from], asked.timeout, {})
    if failure:
        print(last_lines(log))
        return Training(failure)
    return Training("", **json.loads(result.read_text()))


def _failure(training: Training) -> str:
    if training.failure:
        return training.failure
    if not training.losses:
        return f"it applied no step; its first loss is {training.skipped[0]}"
    first, last = training.losses[0], training.losses[-1]
    return "" if last < first else f"the loss does not fall: {first:.3f}, then {last:.3f}"


def _is_finite(training: Training | None) -> bool:
    return training is not None and not all(map(math.isnan, [*training.losses, *training.skipped]))


def _cells(port: Port) -> list[str]:
    done = port.migration
    ends = f"{port.half.losses[0]:.2f}, {port.half.losses[-1]:.2f}" if port.half.losses else ""
    counts = [f"{done.edited}, {done.edits.total()}", str(done.findings.total()), str(done.notes.total())]
    return [*counts, ends, str(len(port.half.skipped)), f"{port.difference:.1e}"]


def _figures(port: Port) -> dict[str, Any]:
    trainings = {"own": port.own, "O1": port.half, "O0": port.single, "unheeded": port.unheeded}
    return {
        "migration": port.migration._asdict(),
        "difference": port.difference,
        "trainings": {name: each._asdict() for name, each in trainings.items() if each is not None},
    }


if __name__ == "__main__":
    sys.exit(main())
