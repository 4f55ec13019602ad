"""Reads the last loss scale of a training run from what tfmp or another system saved."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfmp.checkpoints.files import SavedRun, read_saved_run
from tfmp.checkpoints.layouts import FoundScale, find_scales


class SavedLossScale(NamedTuple):
    """A loss scale and its counters, as a training run saved them.

    Attributes:
        loss_scale: The saved scale. It is not validated: some systems let it reach 0 or infinity.
        good_steps: The number of finite steps since the scale last changed or a step overflowed.
        bad_steps: The number of overflowed steps since the scale last changed. It is 0 for systems that lower the scale
            at each overflow, as `tfmp.LogMaxLossScaleManager` does too. It is negative while the hysteresis of a
            manager still tolerates overflows.
        writer: The name of the system that saved the scale, as a text for people.
        key: The key of the scale in the checkpoint or file.
    """

    loss_scale: float
    good_steps: int
    bad_steps: int
    writer: str
    key: str


def read_loss_scale_state(path: str | os.PathLike[str], key: str | None = None) -> SavedLossScale:
    """Read the last loss scale of a training run from what tfmp or another system saved.

    A run that moves to tfmp can start from this scale instead of searching for a good scale again. Pass `loss_scale` to
    a manager as `init_loss_scale`, or pass the scale and its counters to the method `continue_from` of a manager that
    changes its scale. Reading needs only TensorFlow, not the version of Keras that wrote the file.

    The function finds the loss scale of

    * tf.contrib.mixed_precision and tfmp, in checkpoints of a `Saver` and of Estimator;
    * TensorFlow's `MixedPrecisionLossScaleOptimizer`, which `enable_mixed_precision_graph_rewrite` creates, in
      checkpoints of a `Saver` and of `tf.train.Checkpoint`;
    * Keras 2 (Keras 2.15 and tf_keras), in checkpoints, in weights in TensorFlow's format, and in SavedModels;
    * Keras 3, in checkpoints and in `.keras`, `.weights.h5` and `.h5` files;
    * tfmp's wrapper for an optimizer of either Keras, in all of these.

    The scale of your own manager class is found if its variables have the same names as those of tfmp's managers.
    Weights files (`.weights.h5`, and `.keras`, which contains one) of Keras' own wrapper, and of tfmp 0.2 and earlier,
    have no names. There your manager is not found, or it is mistaken for one of tfmp's managers if its variables have
    the same types.

    A fixed scale is not a variable, so no checkpoint holds it. It is read from files in which Keras describes the
    optimizer, which are `.keras` and `.h5` files. In this case `good_steps` and `bad_steps` are 0.

    Args:
        path: The prefix of a checkpoint; a directory that holds checkpoints (the latest is read) or a SavedModel; or a
            `.keras`, `.weights.h5` or `.h5` file.
        key: The key of the scale to read, if the file holds several scales, as that of a GAN may. Without a key, the
            error lists the keys of all scales.

    Returns:
        The loss scale and its counters.

    Raises:
        FileNotFoundError: There is no such file or checkpoint.
        ValueError: The file cannot be read; or it holds no loss scale; or it holds several and `key` is not given; or
            it holds no scale with this key; or the counters of several scales cannot be told apart, as in a checkpoint
            of a `Saver` with managers of several classes.

    Examples:
        >>> import tempfile, tensorflow as tf, tfmp
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session, tempfile.TemporaryDirectory() as path:
        ...     _ = tfmp.ExponentialUpdateLossScaleManager(4096, 1000)  # in place of tf.contrib's manager
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     _ = tf.compat.v1.train.Saver().save(session, path + "/model.ckpt")
        ...     saved = tfmp.checkpoints.read_loss_scale_state(path)
        >>> saved.loss_scale, saved.good_steps, saved.bad_steps
        (4096.0, 0, 0)
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(init_loss_scale=saved.loss_scale, incr_every_n_steps=1000)
    """
    run = read_saved_run(os.fspath(path))
    found = {scale.scale: scale for scale in find_scales(run)}
    if key is not None and key not in found:
        raise ValueError(f"{run.path} holds no loss scale with the key {key!r}. {_listed('loss scales', list(found))}.")
    if len(found) > 1 and key is None:
        raise ValueError(f"{run.path} holds several loss scales: pass key=, one of {', '.join(map(repr, found))}.")
    if not found:
        return _fixed(run)
    return _state(run, found[key] if key is not None else next(iter(found.values())))


def _state(run: SavedRun, found: FoundScale) -> SavedLossScale:
    return SavedLossScale(
        float(run.scalars[found.scale]),
        int(run.scalars[found.good]),
        0 if found.bad is None else int(run.scalars[found.bad]),
        found.writer,
        found.scale,
    )


def _fixed(run: SavedRun) -> SavedLossScale:
    """Return the fixed scale in Keras' description of the optimizer, or raise an error that lists the keys."""
    optimizer = run.optimizer or {}
    config: Mapping[str, Any] = optimizer.get("config") or {}
    manager = config.get("loss_scale_manager") or {}
    if manager.get("class_name") == "FixedLossScaleManager":
        scale = float(manager["config"]["loss_scale"])
        return SavedLossScale(scale, 0, 0, "tfmp's FixedLossScaleManager", "loss_scale_manager")
    if "dynamic" in config and "initial_scale" in config:
        scale = float(config["initial_scale"])
        if not config["dynamic"]:
            return SavedLossScale(scale, 0, 0, "Keras 2's LossScaleOptimizer with a fixed scale", "initial_scale")
        raise ValueError(
            f"{run.path} does not hold the loss scale: Keras 2's own LossScaleOptimizer leaves it out of this format. "
            f"Read a tf.train.Checkpoint of that run, or start again from its initial scale, {scale:g}."
        )
    raise ValueError(
        f"{run.path} holds no loss scale. tfmp looked for loss_scale with good_steps and bad_steps (tf.contrib, tfmp) "
        "or log_mean (tfmp), current_loss_scale with good_steps (TensorFlow's MixedPrecisionLossScaleOptimizer, "
        "Keras 2), dynamic_scale with step_counter (Keras 3), and the variables of a wrapper in Keras' weights files. "
        "A fixed scale is not saved in a checkpoint, Keras 2's own scale is not saved in a weights file, and neither "
        "is saved in a SavedModel that was exported for serving. "
        f"{_listed('keys', run.keys)}."
    )


def _listed(what: str, keys: Sequence[str]) -> str:
    if not keys:
        return f"It has no {what}"
    return f"The first {what}: {', '.join(keys[:_LISTED])}" if len(keys) > _LISTED else f"Its {what}: {', '.join(keys)}"


#: The largest number of keys that an error lists.
_LISTED = 10
