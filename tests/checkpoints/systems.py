"""Runs a short training with each system's loss scaling and saves its files, for the tests that read them.

    python tests/checkpoints/systems.py DIRECTORY

writes the files of all systems that are installed; `tests/recordings/scales` was made so.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

import tfmp

#: Four finite steps and an overflow. Systems that halve the scale at each overflow end at 512, tfmp's manager at 1024.
FACTORS = (1.0, 1.0, float("inf"), 1.0, 1.0)
#: The scale, good steps and bad steps at the end: of other systems, of tfmp, and of a fixed scale.
STOCK, OWN, FIXED = (512.0, 2, 0), (1024.0, 2, 1), (128.0, 0, 0)


def keras_of(name: str) -> ModuleType | None:
    """Return Keras 3 ("keras3"), Keras 2.15 ("keras2") or "tf_keras"; None if it is not installed."""
    package = "tf_keras" if name == "tf_keras" else "keras"
    if importlib.util.find_spec(package) is None:
        return None
    if not importlib.metadata.version(package).startswith("3." if name == "keras3" else "2."):
        return None
    return importlib.import_module(package)


def own_manager() -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 4, 2, decr_ratio=0.5)


def tolerant_manager() -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 4, 2, decr_ratio=0.5, tolerance=0.25)


def log_max_manager() -> tfmp.LossScaleManager:
    """Return a manager whose bounds keep its scale constant."""
    return tfmp.LogMaxLossScaleManager(init_loss_scale=1024, min_loss_scale=1024, max_loss_scale=1024)


#: Each manager that has a state, with its state at the end.
OWN_MANAGERS = {
    "exponential": (own_manager, OWN),
    "tolerant": (tolerant_manager, OWN),
    "log_max": (log_max_manager, (1024.0, 2, 0)),
}


def own_around(keras: ModuleType, make: Callable[[], tfmp.LossScaleManager] = own_manager) -> Any:
    return tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), make())


def stock_around(keras: ModuleType) -> Any:
    wrapper = keras.mixed_precision.LossScaleOptimizer
    return wrapper(keras.optimizers.SGD(0.5), initial_scale=1024.0, dynamic_growth_steps=4)


def fixed_around(keras: ModuleType) -> Any:
    return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic=False, initial_scale=128.0)


def own_fixed_around(keras: ModuleType) -> Any:
    return tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), tfmp.FixedLossScaleManager(128))


def trained_model(keras: ModuleType, optimizer: Any) -> Any:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", run_eagerly=True)
    for factor in FACTORS:
        model.train_on_batch(np.full([1, 1], factor, np.float32), np.ones([1, 1], np.float32))
    return model


def checkpoint(model: Any, directory: Path) -> Path:
    return Path(tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(directory / "model.ckpt")))


def keras_file(model: Any, directory: Path) -> Path:
    model.save(directory / "model.keras")
    return directory / "model.keras"


def weights_file(model: Any, directory: Path) -> Path:
    model.save_weights(directory / "model.weights.h5")
    return directory / "model.weights.h5"


def legacy_file(model: Any, directory: Path) -> Path:
    model.save(directory / "model.h5")
    return directory / "model.h5"


def tensorflow_weights(model: Any, directory: Path) -> Path:
    model.save_weights(directory / "weights")
    return directory / "weights"


def saved_model(model: Any, directory: Path) -> Path:
    tf.saved_model.save(model, str(directory / "saved_model"))
    return directory / "saved_model"


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


def own(opt: Any, make: Callable[[], tfmp.LossScaleManager] = own_manager) -> Any:
    return tfmp.LossScaleOptimizer(opt, make())


def main(root: Path) -> None:
    """Write the files of all installed systems except tf_keras, whose files are like those of Keras 2.15."""
    for name in ("keras2", "keras3"):
        if (keras := keras_of(name)) is None:
            continue
        for of, wrap in {"stock": stock_around, "own": own_around}.items():
            directory = root / f"{name}_{of}"
            directory.mkdir(parents=True)
            model = trained_model(keras, wrap(keras))
            checkpoint(model, directory)
            keras_file(model, directory)
            if of == "own" or name == "keras3":
                weights_file(model, directory)
    directory = root / "tensorflow"
    directory.mkdir(parents=True)
    train_in_session(tensorflows, directory)
    # This file holds the path.
    (directory / "checkpoint").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
