"""Measures what an optimizer's step costs in Keras: wrapped by tfmp, wrapped by its peers, and bare.

    python -m benchmarks.step_cost --json step_cost.json --plot step_cost.png

All contenders take the same steps in one process, in turns. Figures are medians, and ratios compare steps of the same
round; beside each ratio stand the bounds of the middle half of its values. "copy" reads and writes all gradients once,
"read" only reads them. "bare, compiled" is the unwrapped optimizer compiled by XLA: because tfmp compiles its update,
the cost of wrapping is the difference to that. "GradScaler" is the unwrapped optimizer with a `tfmp.GradScaler`; in
cells that clip, the script clips, between `unscale` and `step`. Peak memory is what a step needs above the memory in
use before it. Only tensors of 256 KiB or more are counted, so it says nothing about small tensors.

With `--baseline PATH`, tfmp's steps are compared with those of another checkout of tfmp, and no peers are measured: one
process for each checkout, both with the same cells and the same benchmark code, take turns. A ratio above 1 means that
this checkout is slower. The ratio of the bare optimizer, which is the same in both processes, shows the noise.

With TensorFlow 2.15 it measures the legacy optimizers of Keras 2: bare, wrapped by Keras 2 and wrapped by tfmp.

Graph mode has a benchmark of its own, `benchmarks.graph_step_cost`.
"""

import sys
from collections.abc import Sequence

import tensorflow as tf

from benchmarks.harness import cells, keras_contenders, series
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Results
from benchmarks.harness.series import Series

_COLORS = {
    "bare": "silver",
    "tfmp": "tab:blue",
    "GradScaler": "tab:cyan",
    "tf_keras": "tab:orange",
    "tfmp, tf_keras": "lightskyblue",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 1 if a contender took wrong steps.
    """
    parser = cells.parser(__doc__, list(keras_contenders.MODES), keras_contenders.OPTIMIZERS, rounds=11)
    options = parser.parse_args(argv)
    if keras_contenders.KERAS == "Keras 2" and "float16" in (options.dtypes or ()):
        parser.error("legacy optimizers take no float16 gradients of float32 weights: leave out --dtypes.")
    keras_contenders.make_devices()
    bases = ("copy", "bare", keras_contenders.KERAS)
    return series.run(
        Series(keras_contenders.contenders, keras_contenders.left_out, bases, _cost_of_wrapping, _COLORS), options
    )


def _cost_of_wrapping(cell: Cell, results: Results) -> str:
    if cell.mode != "function" or cell.outcome != "good":
        return ""
    return f"cost of wrapping: {results.cost('tfmp', 'bare, compiled', unit='read'):.2f} reads of the gradients"


if __name__ == "__main__":
    # TensorFlow warns of a function that is traced too often: the contenders' functions share their code, so that it
    # takes them for one function.
    tf.get_logger().setLevel("ERROR")
    sys.exit(main())
