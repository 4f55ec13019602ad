"""Migrates public BERT scripts, then trains them at a tiny size.

    PYTHONPATH=. python port_tests/port_bert.py --nvidia DIR --google DIR --json port.json

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
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from migrations import Migration, copy_checkout, migrate, migration_table
from port_bert_outcomes import Outcome, ends
from port_bert_runs import SCRIPT, Bench
from port_bert_sources import COLUMNS, GOOGLE, NVIDIA, Configuration, Source

from benchmarks.harness import report


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
            copy_checkout(path, copy)
            try:
                figures[source.name] = _port(bench, source, copy, asked)
            except (RuntimeError, ValueError) as error:
                print(f"port_bert: error: {error}", file=sys.stderr)
                return 2
    report.write_json(asked.json, {"conditions": conditions, "figures": figures})
    judged = "kit" if "kit" in asked.columns else ""
    problems = [item for each in figures.values() for item in each["problems"].items()]
    return int(any(problem for name, problem in problems if name.endswith(judged)))


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


if __name__ == "__main__":
    sys.exit(main())
