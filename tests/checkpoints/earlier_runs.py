"""Runs whose files an earlier tfmp saved in the middle of a window: each saves, or loads and goes on.

`python tests/checkpoints/earlier_runs.py NAME DIRECTORY` writes a file of the tfmp that is imported.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

#: The loss of each micro-batch is multiplied by its factor: the third overflows.
_FACTORS = (1.0, -2.0, float("inf"), 3.0, 1.0, 2.0, -1.0, 1.0, 4.0, 1.0, 3.0)
#: The file is written after so many, in the middle of a window.
_SAVED_AFTER = 7

_SETTINGS: dict[str, Any] = {"accumulation_steps": 2}


def _manager() -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(
        2.0**10, incr_every_n_steps=2, decr_every_n_nan_or_inf=1, decr_ratio=0.5
    )


def of_keras(keras: ModuleType, path: Path, *, saves: bool) -> list[Any]:
    """Train a Keras model, which is saved as the name of the file says; return its values at the end."""
    if not saves and path.suffix == ".keras":
        model = keras.saving.load_model(path)
    else:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.5), _manager(), **_SETTINGS), "mse")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    if not saves:
        status = checkpoint.read(str(path)) if path.suffix == ".ckpt" else None
        model.optimizer.build(model.trainable_variables)
        if status is not None:
            status.assert_consumed()
        elif path.suffix == ".h5":
            model.load_weights(str(path))
    opt = model.optimizer
    variables = model.trainable_variables

    def train(factors: tuple[float, ...]) -> None:
        for factor in factors:
            with tf.GradientTape() as tape:
                loss = opt.scale_loss(tf.reduce_sum(model(tf.constant([[1.0, 2.0, 3.0]]))) * factor)
            opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    if saves:
        train(_FACTORS[:_SAVED_AFTER])
        save = {".ckpt": checkpoint.write, ".h5": model.save_weights, ".keras": model.save}[path.suffix]
        save(str(path))
    train(_FACTORS[_SAVED_AFTER:])
    return [np.asarray(variable).tolist() for variable in [*model.weights, *opt.variables]]


def of_session(path: Path, *, saves: bool) -> list[Any]:
    """Train in a graph, which a Saver saves; return every global variable at the end."""
    with tf.Graph().as_default(), tf1.Session() as session:
        factor = tf1.placeholder(tf.float32, [])
        w = tf1.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
        opt = tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(0.5), _manager(), **_SETTINGS)
        train_op = opt.minimize(tf.reduce_sum(w * [1.0, -2.0]) * factor, tf1.train.get_or_create_global_step())
        variables = sorted(tf1.global_variables(), key=lambda variable: variable.name)
        saver = tf1.train.Saver()

        def train(factors: tuple[float, ...]) -> None:
            for each in factors:
                session.run(train_op, {factor: each})

        if saves:
            session.run(tf1.global_variables_initializer())
            train(_FACTORS[:_SAVED_AFTER])
            saver.save(session, str(path), write_meta_graph=False)
        else:
            saver.restore(session, str(path))
        train(_FACTORS[_SAVED_AFTER:])
        return [[variable.op.name, session.run(variable).tolist()] for variable in variables]


def of_scaler(path: Path, *, saves: bool) -> list[Any]:
    """Train in an eager loop with a GradScaler and an accumulator; return what it has at the end."""
    w, optimizer = tf.Variable([1.0, 2.0]), tf1.train.MomentumOptimizer(0.5, 0.9)
    scaler = tfmp.GradScaler(manager=_manager())
    accumulator = tfmp.GradientAccumulator([w], **_SETTINGS)
    checkpoint = tf.train.Checkpoint(w=w, optimizer=optimizer, scaler=scaler, accumulator=accumulator)

    def train(factors: tuple[float, ...]) -> None:
        for factor in factors:
            with tf.GradientTape() as tape:
                loss = scaler.scale(tf.reduce_sum(w * [1.0, -2.0]) * factor)
            accumulator.add(tape.gradient(loss, [w]), scaler.loss_scale)
            if accumulator.is_full:
                scaler.step(optimizer, zip(scaler.unscale(optimizer, accumulator), [w], strict=True))
                scaler.update()

    if saves:
        train(_FACTORS[:_SAVED_AFTER])
        checkpoint.write(str(path))
    else:
        checkpoint.read(str(path))
    train(_FACTORS[_SAVED_AFTER:])
    state = [*w.numpy().tolist(), scaler.state_dict(), accumulator.tried.numpy().item()]
    return [*state, accumulator.sums[0].numpy().tolist(), optimizer.get_slot(w, "momentum").numpy().tolist()]


#: By a name: what trains, and the file that it writes.
RUNS: dict[str, tuple[Callable[..., list[Any]], str]] = {
    "keras2": (of_keras, "model.keras"),
    "keras3": (of_keras, "model.keras"),
    "keras2_checkpoint": (of_keras, "model.ckpt"),
    "keras3_checkpoint": (of_keras, "model.ckpt"),
    "keras2_weights": (of_keras, "model.weights.h5"),
    "keras3_weights": (of_keras, "model.weights.h5"),
    "session": (of_session, "model.ckpt"),
    "scaler": (of_scaler, "model.ckpt"),
}


def _main(name: str, directory: str) -> None:
    run, file = RUNS[name]
    folder = Path(directory) / name
    folder.mkdir(parents=True)
    arguments = [importlib.import_module("keras")] if name.startswith("keras") else []
    expected = run(*arguments, folder / file, saves=True)
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
