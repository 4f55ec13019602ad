"""Measures what an optimizer's step costs in Keras: wrapped by tfmp, wrapped by its peers, and bare.

    python -m benchmarks.step_cost --json step_cost.json --plot step_cost.png      # all steps: half an hour
    python -m benchmarks.step_cost --short                                         # when code changes: five minutes

All contenders take the same steps in one process, in turns; steps with other shapes, or run in another way, have a
process of their own. A turn has several steps if steps are short. Figures are medians, and ratios compare turns of the
same round; beside each ratio stand the bounds of the middle half of its values. "copy" reads and writes all gradients
once, "read" only reads them. "bare, compiled" is the unwrapped optimizer compiled by XLA: because tfmp compiles its
update, the cost of wrapping is the difference to that. "GradScaler" is the unwrapped optimizer with a
`tfmp.GradScaler`; in cells that clip, the script clips, between `unscale` and `step`. Peak memory is what a step needs
above the memory in use before it. Only tensors of 256 KiB or more are counted, so it says nothing about small tensors.
The first two calls trace and compile; in eager code, tfmp compiles in the second one. The last tables have a row for
each step.

With `--baseline PATH`, tfmp's steps are compared with those of another checkout of tfmp, and no peers are measured: one
process for each checkout, both with the same cells and the same benchmark code, take turns. A ratio above 1 means that
this checkout is slower. The ratio of the bare optimizer, which is the same in both processes, shows the noise.

With TensorFlow 2.15 it measures the legacy optimizers of Keras 2: bare, wrapped by Keras 2 and wrapped by tfmp.

Graph mode has a benchmark of its own, `benchmarks.graph_step_cost`.
"""

import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf

from benchmarks.harness import cells, keras_contenders, series
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Results
from benchmarks.harness.series import Series

_NAMES_OF_SHORT = ("bare", keras_contenders.KERAS, "tfmp", "GradScaler")

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
    parser = cells.parser(
        __doc__, list(keras_contenders.MODES), keras_contenders.OPTIMIZERS, rounds=11, short=list(_short())
    )
    options = parser.parse_args(argv)
    if keras_contenders.KERAS == "Keras 2" and "float16" in (options.dtypes or ()):
        parser.error("legacy optimizers take no float16 gradients of float32 weights: leave out --dtypes.")
    settings = Series(
        keras_contenders.contenders,
        keras_contenders.left_out,
        bases=("copy", "bare", keras_contenders.KERAS),
        remark=_cost_of_wrapping,
        colors=_COLORS,
        prepare=keras_contenders.make_devices,
    )
    if options.short:
        settings = settings._replace(bases=settings.bases[1:], remark=lambda *_: "", names=_NAMES_OF_SHORT)
    return series.run(settings, options)


def _short() -> Iterator[Cell]:
    plain, adam = keras_contenders.OPTIMIZERS[:2]
    for shapes in ("bert", "small"):
        for mode in ("function", "eager"):
            yield from (Cell(shapes, mode, optimizer) for optimizer in (plain, adam))
            if shapes == "bert":
                # The contender "GradScaler" clips by itself here.
                yield Cell(shapes, mode, adam, clipping="clipped")
            if mode == "function":
                yield Cell(shapes, mode, adam, outcome="skipped")


def _cost_of_wrapping(cell: Cell, results: Results) -> str:
    if cell.mode != "function" or cell.outcome != "good":
        return ""
    return f"cost of wrapping: {results.cost('tfmp', 'bare, compiled', unit='read'):.2f} reads of the gradients"


if __name__ == "__main__":
    # TensorFlow warns of a function that is traced too often: the contenders' functions share their code, so that it
    # takes them for one function.
    tf.get_logger().setLevel("ERROR")
    sys.exit(main())
