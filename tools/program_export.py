"""Writes functions of TensorFlow as programs of XLA, with a script that runs them where there is no TensorFlow."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf

from tfmp.core import tracing

_HERE = Path(__file__).parent


class Exported(NamedTuple):
    """A program: the module of XLA, and what `programs.json` says of it."""

    module: bytes
    entry: dict[str, Any]


@contextlib.contextmanager
def for_accelerators(really: bool = True) -> Iterator[None]:
    """Let tfmp compute sums as it does where TensorFlow sees an accelerator, or as on CPUs."""
    with mock.patch.object(tracing, "has_accelerator", return_value=really):
        yield


def write(folder: Path, exported: Iterable[Exported], script: str) -> None:
    """Write programs, their `programs.json`, and the script beside this file that runs them, as `run.py`."""
    (folder / "tools").mkdir(parents=True, exist_ok=True)
    entries = []
    for module, entry in exported:
        (folder / entry["file"]).write_bytes(module)
        entries.append(entry)
        print(f"{entry['file']}: {len(module)} bytes", flush=True)
    (folder / "programs.json").write_text(json.dumps(entries, indent=1))
    shutil.copy(_HERE / script, folder / "run.py")
    for name in ("__init__.py", "exported_program.py"):
        shutil.copy(_HERE / name, folder / "tools" / name)


def exported(
    step: tf.types.experimental.PolymorphicFunction,
    arguments: Sequence[Any],
    weights: Sequence[tf.Variable],
    entry: dict[str, Any],
) -> Exported:
    """Return the program of a function.

    Args:
        step: The function, with `jit_compile=True`.
        arguments: Arguments of the right shapes.
        weights: The weights that the function trains. Their first values may be random numbers; the program begins
            with others, of the same standard deviation. Every other variable has to begin with one number.
        entry: What to say of the program in addition.
    """
    concrete = step.get_concrete_function(*arguments)
    by_handle = {id(variable.handle): variable for variable in concrete.variables}
    # The parameters of the program: the arguments, and then the variables in the order in which they were used.
    used = [by_handle[id(handle)] for handle in concrete.captured_inputs]
    places = {id(variable): place for place, variable in enumerate(used)}
    seeds = {id(variable): seed for seed, variable in enumerate(weights)}
    flat = tf.nest.flatten(arguments)
    compiled = step.experimental_get_compiler_ir(*arguments)
    return Exported(
        compiled(stage="hlo_serialized"),
        entry
        | {
            "arguments": [{"shape": each.shape.as_list(), "dtype": each.dtype.name} for each in flat],
            "variables": [_description(variable, seeds.get(id(variable))) for variable in used],
            "weights": [places[id(variable)] for variable in weights],
            "updates": list(_updates(compiled(stage="hlo"), len(flat))),
        },
    )


def _description(variable: tf.Variable, seed: int | None) -> dict[str, Any]:
    value = variable.numpy()
    described = {"shape": list(value.shape), "dtype": value.dtype.name}
    if not np.ptp(np.float64(value)):
        return described | {"value": value.flat[0].item()}
    if seed is None:
        raise ValueError(f"the first value of {variable.name} is not one number, got {value!r}.")
    return described | {"stddev": float(np.std(value)), "seed": seed}


def _updates(module: str, num_arguments: int) -> Iterator[tuple[int, int]]:
    """Yield the outputs of a module that are new values of variables, each with the variable's place."""
    header = module[: module.index("\n")]
    for output, parameter in re.findall(r"\{(\d*)\}: \((\d+),", header):
        yield int(output or 0), int(parameter) - num_arguments
