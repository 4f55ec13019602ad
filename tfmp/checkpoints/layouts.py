"""Where each system puts the loss scale and its counters.

A system is known by what it calls the scale:

    loss_scale            good_steps, bad_steps    tf.contrib and tfmp
    loss_scale            good_steps, log_mean     tfmp's LogMaxLossScaleManager, which counts no bad steps
    current_loss_scale    good_steps               TensorFlow's own wrapper for TF1, and Keras 2's
    dynamic_scale         step_counter             Keras 3's

A `Saver` writes these names, `tf.train.Checkpoint` an object that holds them. Keras' weights files have no names but
the positions of an optimizer's variables; there the types tell. A manager of one's own that keeps a state of the very
types of one of tfmp's cannot be told from it there.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfmp.checkpoints.files import SavedObject, SavedRun


class FoundScale(NamedTuple):
    """A loss scale in what a run was saved in.

    Attributes:
        writer: The system that wrote it, to be read by people.
        scale: The key of the scale.
        good: The key of the count of finite steps.
        bad: The key of the count of overflowed steps; None for systems that do not count them.
    """

    writer: str
    scale: str
    good: str
    bad: str | None


def find_scales(run: SavedRun) -> list[FoundScale]:
    """Return the loss scales in what a run was saved in.

    Args:
        run: What was saved.

    Raises:
        ValueError: There are several managers, and which counter is of which cannot be told.

    Example:
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
    # What tells the system from another with these names.
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
            elif system is _TENSORFLOW and _is_of_keras(objects, index):
                writer = "Keras 2's LossScaleOptimizer"
            bad = None if system.bad is None else keys[system.bad]
            found.append(FoundScale(writer, keys[system.scale], keys[system.good], bad))
    return found


def _is_of_keras(objects: Sequence[SavedObject], scale: int) -> bool:
    """Tell whether the optimizer that holds a scale is of Keras, whose optimizers count their steps."""
    return any(
        holder.children.get("loss_scale") == scale and not {"_iterations", "iter"}.isdisjoint(holder.children)
        for holder in objects
    )


# The path, the name that a number follows when it was taken, the variable below it in a Saver's own map, and the ending
# of Keras' legacy files.
_NAME = re.compile(r"(?P<scope>.*?/)??(?P<name>[a-z_]+?)(_(?P<number>\d+))?(?P<below>/value)?(:0)?")


def _by_names(run: SavedRun) -> list[FoundScale]:
    keys: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for key in run.scalars:
        if match := _NAME.fullmatch(key):
            place = (match["scope"] or "", match["name"], match["below"] or "")
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
                    f"{run.path} holds the scales {', '.join(sorted(scales.values()))} of managers of several kinds, "
                    "and their names do not tell which is of which: read each scale's variable yourself, with "
                    "tf.train.load_checkpoint."
                )
            # The n-th manager made the n-th of each, whatever numbers they got.
            if any(len(column) != len(scales) for column in by_name.values()):
                continue
            columns = [[column[number] for number in sorted(column)] for column in by_name.values()]
            # tf.contrib never met Keras' files.
            writer = system.writer if system is not _TFMP or not scope.startswith("optimizer_weights/") else "tfmp"
            found += [
                FoundScale(writer, row[0], row[1], row[2] if system.bad else None) for row in zip(*columns, strict=True)
            ]
            break
    return found


#: The types of the variables that a wrapper has before those of the optimizer inside it; int64 is `l`.
_POSITIONS = (
    # Keras 3's: iteration, learning rate, count, scale.
    (_KERAS3.writer, re.compile(r"[il]f(?P<good>[il])(?P<scale>f)")),
    # tfmp's for Keras 3, and for Keras 2 without the first two: scale, good, bad, with a tolerance all steps, and what
    # became of the steps.
    ("tfmp", re.compile(r"(?:[il]f)?(?P<scale>f)(?P<good>i)(?P<bad>i)i?lllb")),
    # LogMax: scale, mean, variance, observations, margin, good, and what became of the steps.
    ("tfmp", re.compile(r"(?:[il]f)?(?P<scale>f)ffii(?P<good>i)lllb")),
)


def _by_positions(scalars: Mapping[str, np.generic]) -> list[FoundScale]:
    found = []
    for place in sorted(
        {key.removesuffix("inner_optimizer/vars/0") for key in scalars if key.endswith("/inner_optimizer/vars/0")}
    ):
        types = ""
        while (value := scalars.get(f"{place}vars/{len(types)}")) is not None:
            types += "l" if value.dtype == np.int64 else value.dtype.kind
        for writer, pattern in _POSITIONS:
            if match := pattern.match(types):
                keys = {name: f"{place}vars/{match.start(name)}" for name in match.groupdict()}
                found.append(FoundScale(writer, keys["scale"], keys["good"], keys.get("bad")))
                break
    return found
