"""Reads the loss scale that a run ended with, whichever system saved it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfmp.checkpoints.files import SavedRun, read_saved_run
from tfmp.checkpoints.layouts import FoundScale, find_scales


class SavedLossScale(NamedTuple):
    """A loss scale and its counters, as a run left them.

    Attributes:
        loss_scale: The scale, as it was saved: some systems let it reach 0 or infinity.
        good_steps: Finite steps since the scale last changed or a step overflowed.
        bad_steps: Overflowed steps since the scale last changed; 0 where a system, or a LogMaxLossScaleManager, lowers
            the scale at each. Below 0 while hysteresis forgives them.
        writer: The system that wrote it, to be read by people.
        key: The key of the scale in the file.
    """

    loss_scale: float
    good_steps: int
    bad_steps: int
    writer: str
    key: str


def read_loss_scale_state(path: str | os.PathLike[str], key: str | None = None) -> SavedLossScale:
    """Read the loss scale that a run ended with, whichever system saved it.

    A run that moves to tfmp starts from there, instead of searching for its scale again: give the scale to a manager
    as `init_loss_scale`, or scale and counters to the `continue_from` of one that changes its scale.
    Nothing but TensorFlow is needed to read, not even the Keras that wrote the file.

    It finds the scale of

    * tf.contrib.mixed_precision and tfmp in checkpoints of a `Saver` and of Estimator;
    * TensorFlow's `MixedPrecisionLossScaleOptimizer`, which `enable_mixed_precision_graph_rewrite` makes, in
      checkpoints of a `Saver` and of `tf.train.Checkpoint`;
    * Keras 2 (Keras 2.15, tf_keras) in checkpoints, weights in TensorFlow's format, and SavedModels;
    * Keras 3 in checkpoints, and in files `.keras`, `.weights.h5` and `.h5`;
    * tfmp around either Keras' optimizers in all of these.

    A manager of your own is found where it keeps tfmp's names. Weights files (`.weights.h5`, and `.keras`, which holds
    one) have no names: there it is not found, or taken for one of tfmp's if the types of its variables are the same.

    A scale that was fixed is no variable, and in no checkpoint. It is known from the files of Keras that describe the
    optimizer, `.keras` and `.h5`; from these `good_steps` and `bad_steps` are 0.

    Args:
        path: The prefix of a checkpoint; a directory that holds checkpoints, of which the latest is read, or a
            SavedModel; or a file `.keras`, `.weights.h5` or `.h5`.
        key: Which scale, where there are several, as in a GAN: the key of one that the error lists.

    Returns:
        The scale and its counters.

    Raises:
        FileNotFoundError: There is no such file or checkpoint.
        ValueError: It cannot be read; or it holds no scale, or several and `key` is not given, or none of that key;
            or scales whose counters cannot be told apart, as of a `Saver` with managers of several kinds.

    Example:
        >>> import tempfile, tensorflow as tf, tfmp
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session, tempfile.TemporaryDirectory() as path:
        ...     _ = tfmp.ExponentialUpdateLossScaleManager(4096, 1000)  # stands for tf.contrib's
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     _ = tf.compat.v1.train.Saver().save(session, path + "/model.ckpt")
        ...     saved = tfmp.read_loss_scale_state(path)
        >>> saved.loss_scale, saved.good_steps, saved.bad_steps
        (4096.0, 0, 0)
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(init_loss_scale=saved.loss_scale, incr_every_n_steps=1000)
    """
    run = read_saved_run(os.fspath(path))
    found = {scale.scale: scale for scale in find_scales(run)}
    if key is not None and key not in found:
        raise ValueError(f"{run.path} holds no loss scale of the key {key!r}. {_listed('loss scales', list(found))}.")
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
    """Return the scale that Keras' description of the optimizer names; say what is there if it names none."""
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
        f"{run.path} holds no loss scale. Looked for were loss_scale with good_steps and bad_steps (tf.contrib, tfmp) "
        "or log_mean (tfmp), current_loss_scale with good_steps (TensorFlow's MixedPrecisionLossScaleOptimizer, "
        "Keras 2), dynamic_scale with step_counter (Keras 3), and the variables of a wrapper in Keras' weights files. "
        "A fixed scale is in no checkpoint, Keras 2's own scale in no weights file, and neither is in a SavedModel "
        "made to serve a model. "
        f"{_listed('keys', run.keys)}."
    )


def _listed(what: str, keys: Sequence[str]) -> str:
    if not keys:
        return f"There are no {what} in it"
    return f"The first {what}: {', '.join(keys[:_LISTED])}" if len(keys) > _LISTED else f"Its {what}: {', '.join(keys)}"


#: How many keys an error lists.
_LISTED = 10
