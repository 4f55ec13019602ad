"""Tells what each technique of tfmp costs and saves: accuracy, memory and time of three nets by each recipe.

    python -m benchmarks.recipes --json recipes.json --plot docs/images/recipes.png

Three nets are trained on data that scikit-learn and Python include: a convolutional net on images of digits; a small
transformer on the characters of Python's help topics; and the net of the page on ranges, whose branch has gradients
that float16 loses without a loss scale. Each is trained in float32, in float16 without a loss scale and with
`tfmp.LossScaleOptimizer`, and in bfloat16; as it is ("plain"), with the batch in four micro-batches ("accumulation"),
with its blocks in `tfmp.Recompute` ("recomputation"), and with both; with Adam's moments in float32, and in bfloat16 by
`tfmp.half_state`. The option of each of these leaves out the others.

A cell is a net and a recipe. Its step is traced once, and is then trained for each seed, from other weights and with
other batches; these are the same for all recipes. "accuracy" is that on held-out examples, with the standard deviation
over the seeds. "peak" is the largest memory of all tensors that there are at the same time, weights and the state of
the optimizer included; the median over the seeds, since the order in which TensorFlow runs ops is not always the same.
"optimizer" is the part that the optimizer's variables have in it. "ms a step" is the median. Numbers in parentheses are
divided by those of float32, plain, with float32 state.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from benchmarks.harness import report
from benchmarks.recipes import bars, picture, results
from benchmarks.recipes.tasks import NETS, TASKS
from benchmarks.recipes.training import PRECISIONS, STATES, WAYS, Cell, Measured, measure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    found = _read(options.from_json) if options.from_json else _measured(options)
    print(f"\n{results.tables(found)}\n\n{os.linesep.join(bars.sentences(found))}", flush=True)
    if options.plot:
        picture.draw(found, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = {"nets": NETS, "precisions": tuple(PRECISIONS), "ways": tuple(WAYS), "states": STATES}
    for name, of_name in choices.items():
        parser.add_argument(f"--{name}", nargs="+", choices=of_name, default=of_name, help="default: all")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each cell (default: %(default)s)")
    parser.add_argument("--size", choices=TASKS, default="full", help='"tiny" is for trying the command out')
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    parser.add_argument("--from-json", type=Path, help="a file that --json wrote, instead of measuring")
    return parser


def _read(path: Path) -> results.Results:
    return results.from_json(json.loads(path.read_text())["figures"])


def _measured(options: argparse.Namespace) -> results.Results:
    conditions = report.printed_conditions()
    chosen = itertools.starmap(Cell, itertools.product(options.nets, options.precisions, options.ways, options.states))
    cells = list(chosen)
    found: results.Results = {}
    # The cells of a process share what it takes to start one, and to make the weights of each seed.
    for _, group in itertools.groupby(cells, key=lambda cell: (cell.net, cell.precision)):
        with _process() as process:
            for cell in group:
                found[cell] = _figures(process, cell, options)
                print(f"{cell} (cell {len(found)} of {len(cells)}): {_essence(found[cell])}", flush=True)
                # After each cell: a run of all of them takes long.
                figures = {"conditions": conditions, "figures": results.to_json(found)}
                report.write_json(options.json, figures)
    return found


@contextlib.contextmanager
def _process() -> Iterator[ProcessPoolExecutor]:
    # By default, TensorFlow's figures for a CPU leave out tensors below 256 KiB. Those of this allocator count all.
    counting = mock.patch.dict(os.environ, {"TF_CPU_ALLOCATOR_USE_BFC": "1"})
    with counting, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


def _figures(process: ProcessPoolExecutor, cell: Cell, options: argparse.Namespace) -> Measured:
    # What a recipe raises is a result, and so is that its process ends for want of memory.
    try:
        return process.submit(measure, cell, options.size, options.seeds).result()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _essence(measured: Measured) -> str:
    if "error" in measured:
        return str(measured["error"])
    peak, seconds = results.peak(measured), results.seconds(measured)
    memory = "peak not known" if peak is None else f"{peak / 2**20:.1f} MiB"
    return f"{results.accuracy_text(measured)} %, {memory}, {1000 * (seconds or 0):.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
