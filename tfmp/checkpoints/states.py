"""Reads the last loss scale of a training run from what tfmp or another system saved.

The names of the saved variables identify the system that saved them:

    name of the scale     names of the counters    system
    loss_scale            good_steps, bad_steps    tf.contrib and tfmp
    loss_scale            good_steps               tfmp's LogMaxLossScaleManager, which also saves log_mean
    current_loss_scale    good_steps               TensorFlow's own wrapper for TF1, and Keras 2
    dynamic_scale         step_counter             Keras 3

In a checkpoint of a `Saver` they are the keys, in one of `tf.train.Checkpoint` the attributes of an object, in a file
of Keras the names in a group of tfmp's wrapper. Keras' own wrappers, and tfmp 0.2 and earlier, have only the positions
of variables there, whose types identify the system.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfmp.checkpoints.files import SavedObject, SavedRun, read_saved_run


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
    changes its scale. Reading needs only TensorFlow, not the Keras that wrote the file. The scale is found of

    * tf.contrib.mixed_precision and tfmp, in checkpoints of a `Saver` and of Estimator;
    * TensorFlow's `MixedPrecisionLossScaleOptimizer`, which `enable_mixed_precision_graph_rewrite` creates, in
      checkpoints of a `Saver` and of `tf.train.Checkpoint`;
    * Keras 2 (Keras 2.15 and tf_keras), in checkpoints, in weights in TensorFlow's format, and in SavedModels;
    * Keras 3, in checkpoints and in `.keras`, `.weights.h5` and `.h5` files;
    * tfmp's wrapper for an optimizer of either Keras, in all of these;
    * your own manager class, if its variables have the names of those of tfmp's managers. Weights files of Keras' own
      wrapper, and of tfmp 0.2 and earlier, have no names: there a manager is known by the types of its variables.

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
    found = {state.key: state for state in states_in(run)}
    if key is not None and key not in found:
        raise ValueError(f"{run.path} holds no loss scale with the key {key!r}. {_listed('loss scales', list(found))}.")
    if len(found) > 1 and key is None:
        raise ValueError(f"{run.path} holds several loss scales: pass key=, one of {', '.join(map(repr, found))}.")
    if not found:
        return _fixed(run)
    return found[key] if key is not None else next(iter(found.values()))


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


def states_in(run: SavedRun) -> list[SavedLossScale]:
    """Return the loss scales that a saved run holds as variables."""
    if run.objects is not None:
        return list(_in_objects(run.scalars, run.objects))
    return [*_by_names(run), *_by_positions(run.scalars)]


class _System(NamedTuple):
    """The names that a system gives to a scale and its counters."""

    writer: str
    scale: str
    good: str
    bad: str | None = None
    #: The name of one more variable, which tells this system from another with the same names above.
    mark: str | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in self[1:] if name is not None]

    def state(self, scalars: Mapping[str, np.generic], keys: Mapping[str, str], writer: str) -> SavedLossScale:
        return _state(scalars, writer, keys[self.scale], keys[self.good], None if self.bad is None else keys[self.bad])


def _state(scalars: Mapping[str, np.generic], writer: str, scale: str, good: str, bad: str | None) -> SavedLossScale:
    bad_steps = 0 if bad is None else int(scalars[bad])
    return SavedLossScale(float(scalars[scale]), int(scalars[good]), bad_steps, writer, scale)


_TFMP = _System("tf.contrib.mixed_precision or tfmp", "loss_scale", "good_steps", "bad_steps")
_LOG_MAX = _System("tfmp", "loss_scale", "good_steps", mark="log_mean")
_TENSORFLOW = _System("TensorFlow's MixedPrecisionLossScaleOptimizer", "current_loss_scale", "good_steps")
_KERAS3 = _System("Keras 3's LossScaleOptimizer", "dynamic_scale", "step_counter")
_SYSTEMS = (_TFMP, _LOG_MAX, _TENSORFLOW, _KERAS3)


def _in_objects(scalars: Mapping[str, np.generic], objects: Sequence[SavedObject]) -> Iterator[SavedLossScale]:
    for index, candidate in enumerate(objects):
        keys = {name: key for name, child in candidate.children.items() if (key := objects[child].key) is not None}
        for system in _SYSTEMS:
            if keys.keys() >= set(system.names):
                writer = "tfmp" if system is _TFMP else system.writer
                if system is _TENSORFLOW and _is_held_by_keras(objects, index):
                    writer = "Keras 2's LossScaleOptimizer"
                yield system.state(scalars, keys, writer)


def _is_held_by_keras(objects: Sequence[SavedObject], scale: int) -> bool:
    """Return whether an optimizer of Keras holds the scale. Such an optimizer also holds a counter of its steps."""
    return any(
        holder.children.get("loss_scale") == scale and not {"_iterations", "iter"}.isdisjoint(holder.children)
        for holder in objects
    )


# A key is made of the path of a scope; the variable's name; a number, if that name was already taken; "/value", if the
# script passed tfmp's variables to the Saver by the names of their ops; and ":0" in the legacy files of Keras.
_NAME = re.compile(r"(?P<scope>(.*?/)??)(?P<name>[a-z_]+?)(_(?P<number>\d+))?(?P<below>(/value)?)(:0)?")


def _by_names(run: SavedRun) -> Iterator[SavedLossScale]:
    keys: dict[tuple[str, str, str], list[tuple[int, str]]] = defaultdict(list)
    for key in run.scalars:
        if match := _NAME.fullmatch(key):
            keys[match["scope"], match["name"], match["below"]].append((int(match["number"] or 0), key))
    for (scope, name, below), scales in sorted(keys.items()):
        columns = {each: sorted(keys.get((scope, each, below), [])) for system in _SYSTEMS for each in system.names}
        bad, marks = len(columns["bad_steps"]), len(columns["log_mean"])
        if name == _LOG_MAX.scale and bad and marks and bad + marks == len(scales):
            raise ValueError(
                f"{run.path} holds the scales {', '.join(sorted(key for _, key in scales))} of managers of several "
                "classes, and their names do not tell which counters belong to which scale: read each scale's variable "
                "yourself, with tf.train.load_checkpoint."
            )
        for system in _SYSTEMS:
            # Each manager created one variable of each name, so the n-th scale belongs to the n-th counter, even if the
            # numbers in their names differ.
            own = [columns[each] for each in system.names]
            if name == system.scale and all(len(column) == len(scales) for column in own):
                # A scope of a Keras file: tf.contrib cannot have written it.
                of_keras = scope.startswith("optimizer_weights/") or scope.endswith(_STATE_IN_FILES)
                writer = "tfmp" if system is _TFMP and of_keras else system.writer
                for row in zip(*own, strict=True):
                    by_name = dict(zip(system.names, (key for _, key in row), strict=True))
                    yield system.state(run.scalars, by_name, writer)
                break


#: The group of tfmp's variables in a weights file of Keras.
_STATE_IN_FILES = "/_loss_scale_state/vars/"

#: The types of the variables that a wrapper saves in front of those of the wrapped optimizer, one letter for each
#: variable: the kind of its NumPy type, but `l` for int64.
_POSITIONS = (
    # Keras 3's own wrapper: iteration, learning rate, counter, scale.
    (_KERAS3.writer, re.compile(r"[il]f(?P<good>[il])(?P<scale>f)")),
    # tfmp's wrapper with an ExponentialUpdateLossScaleManager: iteration and learning rate (in Keras 3 only), scale,
    # good steps, bad steps, with a tolerance also the steps since a change; three counts and a flag follow.
    ("tfmp", re.compile(r"(?:[il]f)?(?P<scale>f)(?P<good>i)(?P<bad>i)i?lllb")),
    # tfmp's wrapper with a LogMaxLossScaleManager: iteration and learning rate (in Keras 3 only), scale, mean,
    # variance, number of observations, margin, good steps. The outcomes of the steps follow.
    ("tfmp", re.compile(r"(?:[il]f)?(?P<scale>f)ffii(?P<good>i)lllb")),
)


def _by_positions(scalars: Mapping[str, np.generic]) -> Iterator[SavedLossScale]:
    for place in sorted(
        {key.removesuffix("inner_optimizer/vars/0") for key in scalars if key.endswith("/inner_optimizer/vars/0")}
    ):
        if any(key.startswith(f"{place.removesuffix('/')}{_STATE_IN_FILES}") for key in scalars):
            # The values have names, and those of the optimizer may have any types.
            continue
        types = ""
        while (value := scalars.get(f"{place}vars/{len(types)}")) is not None:
            types += "l" if value.dtype == np.int64 else value.dtype.kind
        for writer, pattern in _POSITIONS:
            if match := pattern.match(types):
                keys = {name: f"{place}vars/{match.start(name)}" for name in match.groupdict()}
                yield _state(scalars, writer, keys["scale"], keys["good"], keys.get("bad"))
                break
