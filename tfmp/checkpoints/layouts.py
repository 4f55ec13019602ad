"""Finds the loss scale and its counters among the saved values of a training run.

The names of the saved variables identify the system that saved them:

    name of the scale     names of the counters    system
    loss_scale            good_steps, bad_steps    tf.contrib and tfmp
    loss_scale            good_steps               tfmp's LogMaxLossScaleManager, which also saves log_mean
    current_loss_scale    good_steps               TensorFlow's own wrapper for TF1, and Keras 2
    dynamic_scale         step_counter             Keras 3

A checkpoint of a `Saver` has these names as its keys. A checkpoint of `tf.train.Checkpoint` has an object with
attributes of these names. In a weights file of Keras, tfmp's wrapper has a group of values with these names. Keras' own
wrappers, and tfmp 0.2 and earlier, have none there: the keys are the positions of the optimizer's variables, so the
system is identified by the types of the variables. In such a file, a user's own manager that saves variables of the
same types as one of tfmp's managers cannot be told apart from it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfmp.checkpoints.files import SavedObject, SavedRun


class FoundScale(NamedTuple):
    """The keys of a loss scale and of its counters among the saved values."""

    #: The name of the system that saved the scale, for messages and for the user.
    writer: str
    scale: str
    #: The number of finite steps.
    good: str
    #: The number of overflowed steps; None if the system does not count them.
    bad: str | None


def find_scales(run: SavedRun) -> list[FoundScale]:
    """Return where the loss scales of a saved run are stored.

    Examples:
        >>> scalars = {"loss_scale": np.float32(8), "good_steps": np.int32(2), "bad_steps": np.int32(0)}
        >>> find_scales(SavedRun("model.ckpt", list(scalars), scalars))[0].scale
        'loss_scale'
    """
    if run.objects is not None:
        return _in_objects(run.objects)
    return _by_names(run) + _by_positions(run.scalars)


class _Names(NamedTuple):
    scale: str
    good: str
    bad: str | None
    writer: str
    # The name of one more variable, which tells this system from another with the same names above.
    mark: str | None = None

    @property
    def all(self) -> list[str]:
        return [name for name in (self.scale, self.good, self.bad, self.mark) if name is not None]


_TFMP = _Names("loss_scale", "good_steps", "bad_steps", "tf.contrib.mixed_precision or tfmp")
_LOG_MAX = _Names("loss_scale", "good_steps", None, "tfmp", mark="log_mean")
_TENSORFLOW = _Names("current_loss_scale", "good_steps", None, "TensorFlow's MixedPrecisionLossScaleOptimizer")
_KERAS3 = _Names("dynamic_scale", "step_counter", None, "Keras 3's LossScaleOptimizer")
_SYSTEMS = (_TFMP, _LOG_MAX, _TENSORFLOW, _KERAS3)


def _in_objects(objects: Sequence[SavedObject]) -> list[FoundScale]:
    found = []
    for index, candidate in enumerate(objects):
        values = {name: objects[child].key for name, child in candidate.children.items()}
        for system in _SYSTEMS:
            keys = {name: key for name in system.all if (key := values.get(name)) is not None}
            if len(keys) < len(system.all):
                continue
            writer = system.writer
            if system is _TFMP:
                writer = "tfmp"
            elif system is _TENSORFLOW and _is_held_by_keras(objects, index):
                writer = "Keras 2's LossScaleOptimizer"
            bad = None if system.bad is None else keys[system.bad]
            found.append(FoundScale(writer, keys[system.scale], keys[system.good], bad))
    return found


def _is_held_by_keras(objects: Sequence[SavedObject], scale: int) -> bool:
    """Return whether an optimizer of Keras holds the scale. Such an optimizer also holds a counter of its steps."""
    return any(
        holder.children.get("loss_scale") == scale and not {"_iterations", "iter"}.isdisjoint(holder.children)
        for holder in objects
    )


# A key is made of the path of a scope; the variable's name; a number, if that name was already taken; "/value", if the
# script passed tfmp's variables to the Saver by the names of their ops; and ":0" in the legacy files of Keras.
_NAME = re.compile(r"(?P<scope>(.*?/)??)(?P<name>[a-z_]+?)(_(?P<number>\d+))?(?P<below>(/value)?)(:0)?")


def _by_names(run: SavedRun) -> list[FoundScale]:
    keys: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for key in run.scalars:
        if match := _NAME.fullmatch(key):
            place = (match["scope"], match["name"], match["below"])
            keys[place][int(match["number"] or 0)] = key
    found = []
    for (scope, name, below), scales in sorted(keys.items()):
        for system in _SYSTEMS:
            if name != system.scale:
                continue
            by_name = {each: keys.get((scope, each, below), {}) for each in system.all}
            others = len(keys.get((scope, "bad_steps", below), {}))
            if system is _LOG_MAX and 0 < len(scales) - others < len(scales) == others + len(by_name["log_mean"]):
                raise ValueError(
                    f"{run.path} holds the scales {', '.join(sorted(scales.values()))} of managers of several classes, "
                    "and their names do not tell which counters belong to which scale: read each scale's variable "
                    "yourself, with tf.train.load_checkpoint."
                )
            # Each manager created one variable of each name, so the n-th scale belongs to the n-th counter, even if the
            # numbers in their names differ.
            if any(len(column) != len(scales) for column in by_name.values()):
                continue
            columns = [[column[number] for number in sorted(column)] for column in by_name.values()]
            # A scope of a Keras file: tf.contrib cannot have written it.
            of_keras = scope.startswith("optimizer_weights/") or scope.endswith(_STATE_IN_FILES)
            writer = system.writer if system is not _TFMP or not of_keras else "tfmp"
            found += [
                FoundScale(writer, row[0], row[1], row[2] if system.bad else None) for row in zip(*columns, strict=True)
            ]
            break
    return found


#: The group of tfmp's variables in a weights file of Keras.
_STATE_IN_FILES = "/_loss_scale_state/vars/"

#: The types of the variables that a wrapper saves in front of those of the wrapped optimizer, one letter for each
#: variable: the kind of its NumPy type, but `l` for int64.
_POSITIONS = (
    # Keras 3's own wrapper: iteration, learning rate, counter, scale.
    (_KERAS3.writer, re.compile(r"[il]f(?P<good>[il])(?P<scale>f)")),
    # tfmp's wrapper with an ExponentialUpdateLossScaleManager: iteration and learning rate (in Keras 3 only), scale,
    # good steps, bad steps, with a tolerance also the steps since the last change. The outcomes of the steps follow:
    # three counts and a flag.
    ("tfmp", re.compile(r"(?:[il]f)?(?P<scale>f)(?P<good>i)(?P<bad>i)i?lllb")),
    # tfmp's wrapper with a LogMaxLossScaleManager: iteration and learning rate (in Keras 3 only), scale, mean,
    # variance, number of observations, margin, good steps. The outcomes of the steps follow.
    ("tfmp", re.compile(r"(?:[il]f)?(?P<scale>f)ffii(?P<good>i)lllb")),
)


def _by_positions(scalars: Mapping[str, np.generic]) -> list[FoundScale]:
    found = []
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
                found.append(FoundScale(writer, keys["scale"], keys["good"], keys.get("bad")))
                break
    return found
