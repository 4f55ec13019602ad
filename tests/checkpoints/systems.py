"""Runs a short training with each system's loss scaling and saves its files, for the tests that read them.

    PYTHONPATH=.:tests:tests/optimizers python tests/checkpoints/systems.py DIRECTORY

writes the files of all systems that are installed; `tests/recordings/scales` was made so.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import kerases
import numpy as np
import tensorflow as tf

import tfmp

#: Four finite steps and an overflow. Systems that halve the scale at each overflow end at 512, tfmp's manager at 1024.
FACTORS = (1.0, 1.0, float("inf"), 1.0, 1.0)
#: The scale, good steps and bad steps at the end: of other systems, of tfmp, and of a fixed scale.
STOCK, OWN, FIXED = (512.0, 2, 0), (1024.0, 2, 1), (128.0, 0, 0)


def _exponential(**settings: float) -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 4, 2, decr_ratio=0.5, **settings)


#: Each manager that has a state, with its state at the end.
OWN_MANAGERS: dict[str, tuple[Callable[[], tfmp.LossScaleManager], tuple[float, int, int]]] = {
    "exponential": (_exponential, OWN),
    "tolerant": (lambda: _exponential(tolerance=0.25), OWN),
    # Its bounds keep its scale constant.
    "log_max": (
        lambda: tfmp.LogMaxLossScaleManager(init_loss_scale=1024, min_loss_scale=1024, max_loss_scale=1024),
        (1024.0, 2, 0),
    ),
}


def own_around(keras: ModuleType, make: Callable[[], tfmp.LossScaleManager] = _exponential) -> Any:
    return own(keras.optimizers.SGD(0.5), make)


def stock_around(keras: ModuleType, **settings: Any) -> Any:
    """Wrap an optimizer in Keras' own wrapper."""
    settings = settings or {"initial_scale": 1024.0, "dynamic_growth_steps": 4}
    return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.5), **settings)


def trained_model(keras: ModuleType, optimizer: Any) -> Any:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", run_eagerly=True)
    for factor in FACTORS:
        model.train_on_batch(np.full([1, 1], factor, np.float32), np.ones([1, 1], np.float32))
    return model


def save(model: Any, directory: Path, file: str) -> Path:
    """Write a file; its name tells its form."""
    path = directory / file
    match file:
        case "model.ckpt":
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(path))
        case "saved_model":
            tf.saved_model.save(model, str(path))
        case "model.keras" | "model.h5" | "model.hdf5":
            model.save(path)
        case _:
            model.save_weights(path)
    return path


def train_in_session(wrap: Callable[[Any], Any], directory: Path, optimizers: int = 1) -> Path:
    """Train in a session, and save with a `Saver`; `wrap` wraps the optimizer that it is given."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
        factor = tf.compat.v1.placeholder(tf.float32, [])
        train_ops = [
            wrap(tf.compat.v1.train.GradientDescentOptimizer(0.5)).minimize(tf.reduce_sum(w) * factor)
            for _ in range(optimizers)
        ]
        session.run(tf.compat.v1.global_variables_initializer())
        for value in FACTORS:
            for train_op in train_ops:
                session.run(train_op, {factor: value})
        return Path(tf.compat.v1.train.Saver().save(session, str(directory / "model.ckpt"), write_meta_graph=False))


def tensorflows(opt: Any) -> Any:
    """Wrap an optimizer of TF1 in TensorFlow's own wrapper."""
    experimental = tf.compat.v1.mixed_precision
    return experimental.MixedPrecisionLossScaleOptimizer(opt, experimental.DynamicLossScale(1024.0, 4, 2.0))


def tensorflows_rewrite(opt: Any) -> Any:
    """Enable the graph rewrite for the whole process; the caller must disable it again."""
    experimental = tf.compat.v1.mixed_precision
    return experimental.enable_mixed_precision_graph_rewrite(opt, experimental.DynamicLossScale(1024.0, 4, 2.0))


def own(opt: Any, make: Callable[[], tfmp.LossScaleManager] = _exponential) -> Any:
    return tfmp.LossScaleOptimizer(opt, make())


def main(root: Path) -> None:
    """Write the files of all installed systems. Those of tf_keras are like those of Keras 2.15."""
    for name, keras in kerases.installed().items():
        for of, wrap in {"stock": stock_around, "own": own_around}.items():
            directory = root / f"{name}_{of}"
            directory.mkdir(parents=True)
            model = trained_model(keras, wrap(keras))
            weights = ["model.weights.h5"] if of == "own" or name == "keras3" else []
            for file in ("model.ckpt", "model.keras", *weights):
                save(model, directory, file)
    directory = root / "tensorflow"
    directory.mkdir(parents=True)
    train_in_session(tensorflows, directory)
    # This file holds the path.
    (directory / "checkpoint").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
