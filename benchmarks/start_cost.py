"""Measures what the first uses of tfmp cost: its import, the construction of an optimizer, and the first steps.

    python -m benchmarks.start_cost --json start_cost.json

Each time is that of a process of its own, which has imported TensorFlow and Keras, and has made one tensor. Figures are
medians, and the numbers in parentheses are the bounds of the middle half of the times. "Keras" is Keras' own wrapper,
"bare" the optimizer without a wrapper. The uses of `tfmp.GradScaler` and of `tfmp.LossScaleCallback` are compared with
the wrapper of Keras as well, which is what Keras has for their purpose, and `tfmp.set_precision` with a policy of
Keras. Keras has nothing to compare `import tfmp` with: its wrapper comes with `import keras`.

Each call of a use has a row. The first use of a name such as `tfmp.LossScaleOptimizer` imports what it needs, and the
first call contains this. What garbage collection takes of the objects that were made before is left out.
"""

import argparse
import concurrent.futures
import gc
import importlib.metadata
import multiprocessing
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from benchmarks.harness import contest, report
from benchmarks.harness.first_uses import CONTENDERS, USES

_PRELOADED = ["tensorflow", "keras", "benchmarks.harness.contest", "benchmarks.harness.first_uses"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uses", nargs="+", choices=USES, default=list(USES), help="what to measure (default: all)")
    parser.add_argument("--repetitions", type=int, default=15, help="processes for each time (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    options = parser.parse_args(argv)
    if importlib.metadata.version("keras").startswith("2."):
        parser.error("the uses are those of Keras 3, which is not installed.")
    conditions = report.printed_conditions()
    figures = _measured(options.uses, options.repetitions)
    report.write_json(options.json, {"conditions": conditions, "figures": figures})
    print(_table(figures), flush=True)
    return 0


def _measured(uses: Sequence[str], repetitions: int) -> dict[str, dict[str, list[list[float]]]]:
    """Return the seconds of each call, by use, by contender and by repetition."""
    figures: dict[str, dict[str, list[list[float]]]] = {
        use: {name: [] for name in CONTENDERS if use != "import" or name == "tfmp"} for use in uses
    }
    turns = [(use, name) for use, of_use in figures.items() for name in of_use]
    orders = random.Random(0)
    for _ in range(repetitions):
        # In a new order each time, as the load of the machine changes.
        for use, name in orders.sample(turns, len(turns)):
            figures[use][name].append(_in_fresh_process(use, name))
    return figures


def _in_fresh_process(use: str, contender: str) -> list[float]:
    # A process that is forked by a server starts in no time with what the server imported.
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(_PRELOADED)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_seconds, use, contender).result()


def _seconds(use: str, contender: str) -> list[float]:
    # TensorFlow prepares its devices for the first tensor.
    tf.zeros([])
    prepare, calls = USES[use]
    action = prepare(contender)
    # A full garbage collection of all that TensorFlow made takes 0.3 s. Which contender has to pay it is chance.
    gc.collect()
    gc.freeze()
    return [contest.seconds_of(action) for _ in range(calls)]


def _table(figures: dict[str, dict[str, list[list[float]]]]) -> str:
    rows = []
    for use, of_use in figures.items():
        for call in range(USES[use][1]):
            times = {name: [each[call] for each in of_use.get(name, [])] for name in CONTENDERS}
            ratio = (
                f"{statistics.median(times['tfmp']) / statistics.median(times['Keras']):.2f}" if times["Keras"] else ""
            )
            rows.append([f"{use}, call {call + 1}", *map(_milliseconds, times.values()), ratio])
    return report.table(["", *(f"{name}, ms" for name in CONTENDERS), "tfmp / Keras"], rows)


def _milliseconds(times: Sequence[float]) -> str:
    if not times:
        return ""
    low, median, high = (contest.milliseconds(seconds) for seconds in np.percentile(times, [25, 50, 75]))
    return f"{median} ({low} to {high})"


if __name__ == "__main__":
    sys.exit(main())
