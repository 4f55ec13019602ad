"""Measures what an optimizer's step costs in TensorFlow 1's graph mode: wrapped by tfmp, by its peers, and bare.

    python -m benchmarks.graph_step_cost --json graph_step_cost.json --plot graph_step_cost.png

All contenders take the same steps in one session, in turns; figures are medians, and ratios those of the same round.
"contrib's formula" computes what tf.contrib's optimizer did, "TF core" is what TensorFlow has in its place. "copy"
reads and writes all gradients once, "read" reads them. Peak memory is what a step needs beside what there is before it,
in tensors from 256 KiB: of small ones it tells nothing.

Reference variables go with control flow v1, as after `tf.compat.v1.disable_v2_behavior()`, resource variables with
control flow v2. TensorFlow 1 has no AdamW.
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
        The exit status: 1 if a contender took other steps than it should.
    """
    parser = cells.parser(__doc__, graph_contenders.MODES, list(graph_contenders.OPTIMIZERS), rounds=15)
    bases = ("copy", "bare", "contrib's formula")
    # All of them can take every step: TF core's optimizer with reference variables, too.
    return series.run(
        Series(graph_contenders.contenders, lambda cell: {}, bases, _cost_of_wrapping, _COLORS), parser.parse_args(argv)
    )


def _cost_of_wrapping(cell: Cell, results: Results) -> str:
    if cell.outcome != "good":
        return ""
    reads, of_contrib = (results.cost(name, "bare", unit="read") for name in ("tfmp", "contrib's formula"))
    return (
        f"cost of wrapping: {reads:.2f} reads of the gradients, contrib's formula {of_contrib:.2f}: "
        f"{reads / of_contrib:.2f} of it"
    )


if __name__ == "__main__":
    # It says of what peers need that it is deprecated.
    tf.get_logger().setLevel("ERROR")
    sys.exit(main())
