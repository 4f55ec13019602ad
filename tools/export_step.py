"""Writes whole training steps as programs of XLA, with a script that runs and times them where there is no TensorFlow.

    python -m tools.export_step programs
    python programs/run.py

A step takes gradients and applies them: by a bare optimizer of Keras 3, in Keras' own wrapper, and in tfmp's; by SGD,
by Adam, and by Adam that clips by global norm. Each is one program, as in `tf.function(jit_compile=True)`. The script
needs JAX and NumPy only; copy the folder to the machine with the GPU that is to be measured.

The programs are those for accelerators: sums are reductions. With `--for-cpu` they are those for CPUs, where tfmp
writes sums as products of matrices.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.harness import cells, keras_contenders
from benchmarks.harness.cells import Cell
from tools import program_export
from tools.program_export import Exported

_WRAPPERS = ("bare", "Keras 3", "tfmp")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the programs.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status, which is 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the programs; it is made")
    parser.add_argument("--shapes", choices=cells.SHAPES, default="bert", help="shapes of the weights (%(default)s)")
    parser.add_argument("--for-cpu", action="store_true", help="write the programs for CPUs")
    options = parser.parse_args(argv)
    if keras_contenders.KERAS != "Keras 3":
        parser.error(f"this exports steps of Keras 3, got Keras {keras.__version__}.")

    with program_export.for_accelerators(not options.for_cpu):
        program_export.write(options.folder, _exported(options.shapes), "run_exported_steps.py")
    return 0


def _exported(shapes: str) -> Iterator[Exported]:
    kinds = [Cell(shapes, "xla", "SGD"), Cell(shapes, "xla", "Adam"), Cell(shapes, "xla", "Adam", "clipped")]
    for cell in kinds:
        for name in _WRAPPERS:
            variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in cells.SHAPES[shapes]]
            opt = keras_contenders.optimizer(cell, name)
            opt.build(variables)
            file = f"{cell.step}-{name}.hlo".replace(", ", "-").replace(" ", "").lower()
            entry = {"file": file, "kind": cell.step, "wrapper": name}
            yield _of_step(opt, variables, entry)


def _of_step(opt: Any, variables: Sequence[Any], entry: dict[str, Any]) -> Exported:  # noqa: ANN401
    @functools.partial(tf.function, jit_compile=True)
    def step(grads: list[tf.Tensor]) -> None:
        opt.apply(grads, variables)

    grads = [tf.zeros(variable.shape) for variable in variables]
    return program_export.exported(step, [grads], [variable.value for variable in variables], entry)


if __name__ == "__main__":
    sys.exit(main())
