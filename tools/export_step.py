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
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from benchmarks.harness import cells, keras_contenders
from benchmarks.harness.cells import Cell
from tfmp.core.gradients import sums

_WRAPPERS = ("bare", "Keras 3", "tfmp")


class _Exported(NamedTuple):
    """A program: the module of XLA, and what `programs.json` says of it."""

    module: bytes
    entry: dict[str, Any]


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
    if keras_contenders.why_not_here():
        parser.error(keras_contenders.why_not_here())

    options.folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    with mock.patch.object(sums, "_has_accelerator", return_value=not options.for_cpu):
        for exported in _exported(options.shapes):
            (options.folder / exported.entry["file"]).write_bytes(exported.module)
            entries.append(exported.entry)
            print(f"{exported.entry['file']}: {len(exported.module)} bytes", flush=True)
    (options.folder / "programs.json").write_text(json.dumps(entries, indent=1))
    shutil.copy(Path(__file__).with_name("run_exported_steps.py"), options.folder / "run.py")
    return 0


def _exported(shapes: str) -> Iterator[_Exported]:
    kinds = [Cell(shapes, "xla", "SGD"), Cell(shapes, "xla", "Adam"), Cell(shapes, "xla", "Adam", "clipped")]
    for cell in kinds:
        for name in _WRAPPERS:
            variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in cells.SHAPES[shapes]]
            opt = keras_contenders.optimizer(cell, name)
            opt.build(variables)
            file = f"{cell.step}-{name}.hlo".replace(", ", "-").replace(" ", "").lower()
            entry = {"file": file, "kind": cell.step, "wrapper": name}
            yield _of_step(opt, variables, entry)


def _of_step(opt: Any, variables: Sequence[Any], entry: dict[str, Any]) -> _Exported:  # noqa: ANN401
    @functools.partial(tf.function, jit_compile=True)
    def step(grads: list[tf.Tensor]) -> None:
        opt.apply(grads, variables)

    grads = [tf.zeros(variable.shape) for variable in variables]
    concrete = step.get_concrete_function(grads)
    by_handle = {id(variable.handle): variable for variable in concrete.variables}
    # The parameters of the program: the gradients, and then the variables in the order in which they were used.
    used = [by_handle[id(handle)] for handle in concrete.captured_inputs]
    places = {id(variable): place for place, variable in enumerate(used)}
    compiled = step.experimental_get_compiler_ir(grads)
    return _Exported(
        compiled(stage="hlo_serialized"),
        entry
        | {
            "gradients": [grad.shape.as_list() for grad in grads],
            "variables": list(map(_description, used)),
            "weights": [places[id(variable.value)] for variable in variables],
            "updates": list(_updates(compiled(stage="hlo"), len(grads))),
        },
    )


def _description(variable: tf.Variable) -> dict[str, Any]:
    value = variable.numpy()
    if np.ptp(np.float64(value)):
        raise ValueError(f"the first value of {variable.name} is not one number, got {value!r}.")
    return {"shape": list(value.shape), "dtype": value.dtype.name, "value": value.flat[0].item()}


def _updates(module: str, num_grads: int) -> Iterator[tuple[int, int]]:
    """Yield the outputs of a module that are new values of variables, each with the variable's place."""
    header = module[: module.index("\n")]
    for output, parameter in re.findall(r"\{(\d*)\}: \((\d+),", header):
        yield int(output or 0), int(parameter) - num_grads


if __name__ == "__main__":
    sys.exit(main())
