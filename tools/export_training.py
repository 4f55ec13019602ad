"""Writes steps of a transformer's training as programs of XLA, to run without TensorFlow.

    python -m tools.export_training programs
    python programs/run.py

A step takes tokens, computes the loss and the gradients, updates the weights by Adam, and returns the loss: in float32,
as it is and with TensorFloat-32 in products of matrices, in mixed precision with bfloat16, and with float16 in Keras'
wrapper and in tfmp's. Each is one program for accelerators, as in `compile(jit_compile=True)`. The script needs JAX and
NumPy only; copy the folder to the machine with the GPU that is to be measured.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from benchmarks import fit_speed
from benchmarks.harness import cells, keras_contenders
from benchmarks.harness.cells import Cell
from tools import program_export
from tools.program_export import Exported


class _Training(NamedTuple):
    policy: str
    wrapper: str
    #: Whether products of float32 matrices may be rounded to TensorFloat-32, which is TensorFlow's default on GPUs.
    tensor_float_32: bool = True


_TRAININGS = {
    "float32": _Training("float32", "bare", tensor_float_32=False),
    "TensorFloat-32": _Training("float32", "bare"),
    "bfloat16": _Training("mixed_bfloat16", "bare"),
    "float16, Keras 3": _Training("mixed_float16", "Keras 3"),
    "float16, tfmp": _Training("mixed_float16", "tfmp"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the programs.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status, which is 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the programs; it is made")
    sizes = {
        "layers": (4, "transformer layers"),
        "hidden": (1024, "width of the layers, a multiple of 64"),
        "vocabulary": (8192, "number of different tokens"),
        "length": (512, "tokens in an example"),
        "batch": (16, "examples in a step"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    options = parser.parse_args(argv)
    if keras_contenders.KERAS != "Keras 3":
        parser.error(f"this exports trainings of Keras 3, got Keras {keras.__version__}.")

    with program_export.for_accelerators():
        program_export.write(options.folder, _exported(options), "run_exported_trainings.py")
    return 0


def _exported(options: argparse.Namespace) -> Iterator[Exported]:
    for name, training in _TRAININGS.items():
        # All begin with weights of the same standard deviations.
        keras.utils.set_random_seed(0)
        model = fit_speed.transformer(argparse.Namespace(**vars(options), policy=training.policy))
        opt = keras_contenders.optimizer(Cell("", "xla", "Adam"), training.wrapper)
        opt.build(model.trainable_variables)
        entry = {
            "file": f"{name}.hlo".replace(", ", "-").replace(" ", "").lower(),
            "wrapper": name,
            "vocabulary": options.vocabulary,
            "operations": _operations(model, options),
        }
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(training.tensor_float_32)
        try:
            exported = _of_training(model, opt, [options.batch, options.length], entry)
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)
        variables = exported.entry["variables"]
        scales = [place for place, each in enumerate(variables) if each.get("value") == cells.SCALE]
        yield exported._replace(entry=exported.entry | {"loss_scale": scales[0] if scales else None})


def _of_training(model: keras.Model, opt: Any, shape: list[int], entry: dict[str, Any]) -> Exported:  # noqa: ANN401
    @functools.partial(tf.function, jit_compile=True)
    def step(tokens: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(tokens, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
            scaled = opt.scale_loss(loss)
        weights = [variable.value for variable in model.trainable_variables]
        opt.apply(tape.gradient(scaled, weights), model.trainable_variables)
        return loss

    tokens = tf.zeros(shape, tf.int32)
    weights = [variable.value for variable in model.trainable_variables]
    return program_export.exported(step, [tokens, tokens], weights, entry)


def _operations(model: keras.Model, options: argparse.Namespace) -> int:
    """Return the operations of the products of matrices in a step, forward and backward."""
    tokens = options.batch * options.length
    embedding = options.vocabulary * options.hidden
    kernels = sum(int(np.prod(each.shape)) for each in model.trainable_variables if len(each.shape) > 1) - embedding
    attention = options.layers * 2 * options.length * options.hidden
    return 3 * 2 * tokens * (kernels + attention)


if __name__ == "__main__":
    sys.exit(main())
