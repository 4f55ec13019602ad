"""Measures what it costs to read the norm of the gradients after each step, and to look for spikes.

    python -m benchmarks.norm_cost --json norm_cost.json

The contenders are a Keras optimizer that is wrapped by tfmp ("tfmp"), the same with steps that measure the norm, which
is read after each of them ("tfmp, norm"), and the same with a spike detector too ("tfmp, spikes"). All take the same
steps in one process, in turns. Figures are medians, and ratios compare steps of the same round; beside each ratio stand
the bounds of the middle half of its values.
"""

import sys
from collections.abc import Sequence

import tensorflow as tf

from benchmarks.harness import cells, keras_contenders, series
from benchmarks.harness.series import Series

_NAMES = ("tfmp", keras_contenders.NORM, keras_contenders.SPIKES)
_COLORS = {keras_contenders.NORM: "tab:blue", keras_contenders.SPIKES: "tab:red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 1 if a contender took wrong steps.
    """
    parser = cells.parser(__doc__, list(keras_contenders.MODES), keras_contenders.OPTIMIZERS, rounds=31)
    options = parser.parse_args(argv)
    settings = Series(
        keras_contenders.contenders,
        left_out=lambda _: {},
        bases=("tfmp",),
        remark=lambda *_: "",
        colors=_COLORS,
        names=_NAMES,
        prepare=keras_contenders.make_devices,
    )
    return series.run(settings, options)


if __name__ == "__main__":
    # TensorFlow warns of a function that is traced too often: the contenders' functions share their code, so that it
    # takes them for one function.
    tf.get_logger().setLevel("ERROR")
    sys.exit(main())
