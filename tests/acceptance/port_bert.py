"""Migrates public BERT scripts, then trains them at a tiny size.

    PYTHONPATH=. python tests/acceptance/port_bert.py --nvidia DIR --google DIR --json port.json

DIR is a checkout of NVIDIA's or of Google's BERT for TensorFlow 1: the directory with `run_pretraining.py`. The
directory is copied, and `python -m tfmp.migrate --write` rewrites the copy. Each configuration is trained in a process
of its own, with the checkout's own `optimization.py` as it was migrated ("own"), and with tfmp's kit in its place
("kit"). NVIDIA's `optimization.py` assigns `global_step + 1`, although the optimizer's wrapper counts steps itself.
Therefore it is also trained without that assignment in the configurations with a wrapper, as a person would edit it
("edited").

A step counts as applied if it changed Adam's first moments. A configuration trains if its loss falls, and if the global
step in its checkpoint equals the number of applied steps. This needs TensorFlow 2.15, the last version with
tf.estimator.

The copy has only two more changes. What a CPU lacks is replaced: dllogger, pynvml and, where it is not installed,
Horovod by stand-ins, and the fused layer norm is removed. And the script imports `optimization` through a module that
counts steps.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from port_bert_outcomes import Outcome, ends
from port_bert_runs import SCRIPT, Bench
from port_bert_sources import COLUMNS, GOOGLE, NVIDIA, Configuration, Source

from benchmarks.harness import report

_MIGRATE = (sys.executable, "-m", "tfmp.migrate")

#: The files of a checkout that are not copied: no script needs them, and they may be large.
_IGNORED = shutil.ignore_patterns(".git", "*.ipynb", "results", "checkpoints")


class Migration(NamedTuple):
    """The results of a migration.

    Attributes:
        files: The number of Python files.
        edited: The number of files that the migration rewrites.
        edits: The number of places that the migration rewrites, by rule.
        findings: The number of lines that the migration leaves to a human, by rule.
        notes: The number of lines that the migration only reports, by rule.
        messages: The files that cannot be migrated, then all findings and notes as `file:line: rule: message`.
    """

    files: int
    edited: int
    edits: Counter[str]
    findings: Counter[str]
    notes: Counter[str]
    messages: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Migrate, train and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 0 if all configurations train with the kit, or if there is nothing to train; 1 if one does not;
        2 if a checkout cannot be migrated. If --columns leaves the kit out, the other columns decide.
    """
    asked = _parser().parse_args(argv)
    checkouts = [(source, path) for source, path in ((NVIDIA, asked.nvidia), (GOOGLE, asked.google)) if path]
    skipped = _reason_to_skip(checkouts)
    if skipped:
        print(f"port_bert: skipped: {skipped}")
        return 0
    conditions = report.conditions()
    print(report.lines(conditions), flush=True)
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), asked.steps, asked.timeout)
        for source, path in checkouts:
            copy = Path(directory) / source.name
            shutil.copytree(path, copy, ignore=_IGNORED)
            try:
                figures[source.name] = _port(bench, source, copy, asked)
            except (RuntimeError, ValueError) as error:
                print(f"port_bert: error: {error}", file=sys.stderr)
                return 2
    report.write_json(asked.json, {"conditions": conditions, "figures": figures})
    judged = "kit" if "kit" in asked.columns else ""
    problems = [item for each in figures.values() for item in each["problems"].items()]
    return int(any(problem for name, problem in problems if name.endswith(judged)))


def migrate(copy: Path) -> Migration:
    """Migrate a directory in place.

    Args:
        copy: The copy of a checkout; its files are rewritten.

    Returns:
        The report of the command.

    Raises:
        RuntimeError: The command failed.
    """
    found = parse_migration(_run_migrate("--json", copy), copy)
    _run_migrate("--write", copy)
    return found


def parse_migration(text: str, root: Path) -> Migration:
    """Read the report of `tfmp.migrate --json`.

    Args:
        text: The report, as JSON.
        root: The directory that the paths in messages are relative to.

    Examples:
        >>> edits = [{"rule": "R1", "line": 3}, {"rule": "R2", "line": 7}]
        >>> findings = [{"rule": "R10", "line": 9, "message": "counted twice"}]
        >>> files = [{"path": "/bert/a.py", "edits": edits, "findings": findings}, {"path": "/bert/b.py"}]
        >>> migration = parse_migration(json.dumps({"files": files}), Path("/bert"))
        >>> migration.files, migration.edited, dict(migration.edits), migration.messages
        (2, 1, {'R1': 1, 'R2': 1}, ['a.py:9: R10: counted twice'])
    """
    files = json.loads(text).get("files", [])
    edits = [(each, edit) for each in files for edit in each.get("edits", [])]
    findings = [(each, finding) for each in files for finding in each.get("findings", [])]
    return Migration(
        files=len(files),
        edited=sum(bool(each.get("edits")) for each in files),
        edits=Counter(str(edit.get("rule")) for _, edit in edits),
        findings=Counter(str(got.get("rule")) for _, got in findings if got.get("level") != "note"),
        notes=Counter(str(got.get("rule")) for _, got in findings if got.get("level") == "note"),
        messages=[
            *(f"{_relative(each['path'], root)}: {each['error']}" for each in files if each.get("error")),
            *(
                f"{_relative(each['path'], root)}:{got.get('line')}: {got.get('rule')}: "
                f"{got.get('message', '')} {got.get('detail', '')}".rstrip()
                for each, got in findings
            ),
        ],
    )


def migration_table(migration: Migration) -> str:
    """Return the numbers of rewritten places, findings and notes, by rule, as a Markdown table.

    Args:
        migration: The results of the migration.
    """
    counts = (migration.edits, migration.findings, migration.notes)
    rules = sorted(set().union(*counts), key=lambda rule: (len(rule), rule))
    rows = [[rule, *(str(count[rule]) for count in counts)] for rule in rules]
    total = f"in all, {migration.edited} of {migration.files} files"
    rows.append([total, *(str(count.total()) for count in counts)])
    return report.table(["rule", "rewritten", "left to a human", "noted"], rows)


def training_table(trained: Mapping[tuple[str, str], Outcome]) -> str:
    """Return the outcome of each configuration as a Markdown table.

    Args:
        trained: Outcomes, by the configuration's name and the column.
    """
    header = ["configuration", "optimization.py", "trains", "runs", "applied", "step", "first loss", "last loss"]
    rows = [[name, column, *_cells(outcome)] for (name, column), outcome in trained.items()]
    return report.table([*header, "loss scale", "seconds"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvidia", type=_checkout, help="a checkout of NVIDIA's BERT")
    parser.add_argument("--google", type=_checkout, help="a checkout of Google's BERT")
    parser.add_argument("--only", default="", help="train configurations whose names contain this (default: all)")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS, help="(default: all)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a training (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=180, help="seconds until a training is ended (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


def _checkout(text: str) -> Path:
    if not (Path(text) / SCRIPT).is_file():
        raise argparse.ArgumentTypeError(f"{text} has no {SCRIPT}: name the directory of a checkout that has it.")
    return Path(text)


def _reason_to_skip(checkouts: Sequence[tuple[Source, Path]]) -> str:
    if not checkouts:
        return "no checkout is given: name one by --nvidia DIR or --google DIR."
    if not hasattr(tf, "estimator"):
        return f"the scripts need tf.estimator, which TensorFlow {tf.__version__} has not: use TensorFlow 2.15."
    return ""


def _run_migrate(option: str, copy: Path) -> str:
    command = [*_MIGRATE, option, str(copy)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    # The command returns 1 if it leaves something to a human.
    if ended.returncode not in (0, 1) or (ended.returncode == 1 and not ended.stdout):
        raise RuntimeError(f"`{' '.join(command)}` ended with status {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout


def _port(bench: Bench, source: Source, copy: Path, asked: argparse.Namespace) -> dict[str, Any]:
    migration = migrate(copy)
    print(f"\n{source.name}: rewritten and left\n\n{migration_table(migration)}\n", flush=True)
    print("\n".join(migration.messages))
    bench.put_columns(source, copy)
    trained = _train(bench, source, copy, asked)
    print(f"\n{source.name}: training\n\n{training_table(trained)}\n", flush=True)
    return _figures(migration, trained)


def _train(bench: Bench, source: Source, copy: Path, asked: argparse.Namespace) -> dict[tuple[str, str], Outcome]:
    chosen = [each for each in source.configurations if asked.only in each.name]
    turns = [(each, column) for each in chosen for column in each.columns if column in asked.columns]
    trained = {}
    for turn, (configuration, column) in enumerate(turns, 1):
        outcome = bench.train(source, configuration, column, copy)
        trained[configuration.name, column] = outcome
        print(_progress(f"{turn}/{len(turns)}", source, configuration, column, outcome), flush=True)
    return trained


def _progress(turn: str, source: Source, configuration: Configuration, column: str, outcome: Outcome) -> str:
    verdict = outcome.problem or f"trains, {outcome.runs[-1].applied} steps"
    line = f"{turn} {source.name}, {configuration.name}, {column}: {verdict} ({outcome.seconds:.0f} s)"
    return line if not outcome.log else f"{line}\n    " + outcome.log.replace("\n", "\n    ")


def _cells(outcome: Outcome) -> list[str]:
    trains = f"no: {outcome.problem}".replace("|", "\\|") if outcome.problem else "yes"
    seconds = f"{outcome.seconds:.0f}"
    step, scale = ("" if value is None else f"{value:,g}" for value in (outcome.step, outcome.scale))
    if not outcome.runs:
        return [trains, "0", "0", step, "", "", scale, seconds]
    first, last = ends([run.loss for run in outcome.runs])
    runs, applied = outcome.runs[-1][:2]
    return [trains, str(runs), str(applied), step, f"{first:.3f}", f"{last:.3f}", scale, seconds]


def _figures(migration: Migration, trained: Mapping[tuple[str, str], Outcome]) -> dict[str, Any]:
    return {
        "migration": migration._asdict(),
        "problems": {", ".join(key): outcome.problem for key, outcome in trained.items()},
        "trainings": {", ".join(key): dict(vars(outcome)) for key, outcome in trained.items()},
    }


def _relative(path: str, root: Path) -> str:
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


if __name__ == "__main__":
    sys.exit(main())
