"""Measures what an optimizer's step costs in TensorFlow 1's graph mode: wrapped by tfmp, by its peers, and bare.

    python -m benchmarks.graph_step_cost --json graph_step_cost.json --plot graph_step_cost.png

All contenders take the same steps in one session, in turns. Figures are medians, and ratios compare steps of the same
round. "contrib's formula" computes what tf.contrib's optimizer computed; "TF core" is its successor in TensorFlow
itself. "copy" reads and writes all gradients once, "read" only reads them. Peak memory is what a step needs above the
memory in use before it. Only tensors of 256 KiB or more are counted, so it says nothing about small tensors.

Reference variables are measured with control flow v1, as after `tf.compat.v1.disable_v2_behavior()`, and resource
variables with control flow v2. TensorFlow 1 has no AdamW.

With `--baseline PATH`, tfmp's steps are compared with those of another checkout of tfmp, and no peers are measured.
"""

import sys
from collections.abc import Sequence

import tensorflow as tf

from benchmarks.harness import cells, graph_contenders, series
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Results
from benchmarks.harness.series import Series

_COLORS = {"bare": "silver", "tfmp": "tab:blue", "TF core": "tab:orange"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 1 if a contender took wrong steps.
    """
    parser = cells.parser(__doc__, graph_contenders.MODES, list(graph_contenders.OPTIMIZERS), rounds=15)
    bases = ("copy", "bare", "contrib's formula")
    # No contender is left out of any cell: TF core's optimizer works with reference variables, too.
    settings = Series(
        graph_contenders.contenders,
        left_out=lambda cell: {},
        bases=bases,
        remark=_cost_of_wrapping,
        colors=_COLORS,
    )
    return series.run(settings, parser.parse_args(argv))


def _cost_of_wrapping(cell: Cell, results: Results) -> str:
    if cell.outcome != "good":
        return ""
    reads, of_contrib = (results.cost(name, "bare", unit="read") for name in ("tfmp", "contrib's formula"))
    return (
        f"cost of wrapping: {reads:.2f} reads of the gradients, contrib's formula {of_contrib:.2f}: "
        f"{reads / of_contrib:.2f} of it"
    )


if __name__ == "__main__":
    # TensorFlow warns that functions are deprecated which the other contenders need.
    tf.get_logger().setLevel("ERROR")
    sys.exit(main())
