"""Measures what loss scaling costs a step of the BERT example.

    python -m benchmarks.bert_speed --json bert.json --plot bert.png -- --hidden_size 256

The example's model, data and optimizer train under tf.estimator with three contenders: the bare optimizer, which the
example itself does not offer; the optimizer wrapped as tf.contrib did it; and the optimizer in tfmp's wrapper. A turn
is a training from the same weights on the same batches. The order of the contenders rotates from round to round. The
first few steps of a turn are not timed. Figures are medians over the turns, and ratios compare turns of the same round.
Options after `--` are passed to the example. The benchmark needs TensorFlow 2.15, the last version with tf.estimator.

The example's hooks, which report every step, are left out. The initial loss scale is low enough that no step overflows,
because a skipped step costs less.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf

from benchmarks.harness import peak_memory, report, training_turns
from benchmarks.harness.bert_training import WRAPPERS, BertData, BertTraining
from estimator_examples.bert import corpus, options, run_pretraining

#: The results of the turns of each contender, by its name; they can be written as JSON.
Figures: TypeAlias = dict[str, dict[str, Any]]

#: Options for the example; those of the command line come after them and override them.
_EXAMPLE = ["--init_loss_scale", "2**15", "--incr_every_n_steps", "2000"]

#: How much the losses of the contenders may differ. Without a loss scale, float16 loses small gradients.
_TOLERANCES = {"fp32": 1e-3, "fp16": 5e-2}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.

    Raises:
        ArithmeticError: The losses of the contenders differ by more than the tolerance.
    """
    asked = _parser().parse_args(argv)
    try:
        run_pretraining.check_packages()
    except ImportError as error:
        print(f"bert_speed: error: {error}", file=sys.stderr)
        return 2
    # This module imports a package that `check_packages` has just looked for.
    from estimator_examples.bert import preparation

    conditions = report.printed_conditions()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        example = options.parse_options([*_EXAMPLE, *asked.example, "--model_dir", directory])
        prepared = preparation.prepare(example, corpus.read_documents(example.input))
        for precision in asked.precisions:
            data = BertData(prepared.training_path, prepared.limits)
            training = BertTraining(precision, example, data)
            figures[precision] = _measure(training, asked)
            print(f"\n{precision}\n{_text(figures[precision])}", flush=True)
    report.write_json(asked.json, {"conditions": conditions, "figures": figures})
    if asked.plot:
        panels = {precision: _rates(each) for precision, each in figures.items()}
        training_turns.plot(panels, "steps per second", asked.plot)
    for precision, each in figures.items():
        losses = {name: figure["losses"] for name, figure in each.items()}
        training_turns.check_losses(losses, _TOLERANCES[precision])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=_TOLERANCES,
        default=["fp32", "fp16"],
        help="types of the model's activations",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="timed steps of a turn (default: %(default)s)")
    parser.add_argument(
        "--memory-turns", type=int, default=3, help="turns in which memory is measured (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    parser.add_argument("example", nargs="*", help="options of the example, after --")
    return parser


def peaks(training: BertTraining, turns: int) -> dict[str, list[int | None]]:
    """Return the peak memory of each contender's turns, in bytes above the memory in use before the turn."""
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    # The first training of a process also fills caches.
    training.turn("bare", 1)
    return {name: [peak_memory.during(lambda n=name: training.turn(n, 5)) for _ in range(turns)] for name in WRAPPERS}


def _measure(training: BertTraining, asked: argparse.Namespace) -> Figures:
    memory = peak_memory.in_own_process(peaks, training, asked.memory_turns)
    figures: Figures = {
        name: {"steps_per_second": [], "losses": [], "skipped": [], "peak_bytes": memory[name]} for name in WRAPPERS
    }
    for turn in range(asked.rounds):
        for name in training_turns.rotated(list(WRAPPERS), turn):
            for figure, value in training.turn(name, asked.steps).items():
                figures[name][figure].append(value)
        latest = {name: rates[-1] for name, rates in _rates(figures).items()}
        print(training_turns.progress(turn, asked.rounds, latest, "steps per second"), flush=True)
    return figures


def _rates(figures: Figures) -> dict[str, list[float]]:
    return {name: each["steps_per_second"] for name, each in figures.items()}


def _text(figures: Figures) -> str:
    seconds = {name: [1 / rate for rate in rates] for name, rates in _rates(figures).items()}
    rows = [
        [
            name,
            f"{statistics.median(each['steps_per_second']):.2f}",
            f"{1000 * statistics.median(seconds[name]):.1f}",
            *(f"{report.median_ratio(seconds[name], seconds[base]):.3f}" for base in list(WRAPPERS)[:2]),
            training_turns.mebibytes(each["peak_bytes"]),
            f"{each['losses'][-1]:.6f}",
            str(each["skipped"][-1]),
        ]
        for name, each in figures.items()
    ]
    header = ["", "steps per second", "ms a step", "of bare", "of contrib's", "peak MiB", "last loss", "skipped"]
    return report.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
