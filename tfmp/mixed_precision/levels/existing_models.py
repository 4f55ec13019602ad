"""tfmp.set_precision: a level of precision for a model that exists."""

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.any_keras.internals import is_function_of_tensorflow, layers_directly_in, own_weights
from tfmp.any_keras.which import is_keras2, keras_of
from tfmp.core import lists
from tfmp.core.dtypes import HALF_TYPES_BY_NAME
from tfmp.mixed_precision.keras_layers import (
    called_layers_of,
    compute_dtype,
    is_quantized,
    layers_of,
    paths_within,
    variable_dtype,
)
from tfmp.mixed_precision.levels.keras_hooks import warn_of_unscaled_loss, wrap_keras
from tfmp.mixed_precision.levels.level import Level, level_of, policy_of, settings_of
from tfmp.mixed_precision.levels.policy_changes import change_policies

#: A layer or model of any Keras.
_Layer: TypeAlias = Any


class LayerPolicy(NamedTuple):
    """What `tfmp.set_precision` did with a layer.

    Attributes:
        name: The name of the layer, after the names of the layers that hold it, such as "encoder/dense".
        before: The name of the policy that the layer had.
        now: The name of the policy that it has.
        reason: Why the layer does not have the level's policy; empty if it has.

    Provisional: a minor version may change it.
    """

    name: str
    before: str
    now: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PolicyReport:
    """What `tfmp.set_precision` did. `print(report)` shows it as a table.

    Attributes:
        level: The name of the level.
        layers: The layers, the model itself first: their `name`, the policies `before` and `now`, and the `reason` if
            that is not the one of the level.

    Provisional: a minor version may change it.
    """

    level: str
    layers: Sequence[LayerPolicy]

    def __str__(self) -> str:
        """Return a table of the layers."""
        rows = [("layer", "before", self.level, ""), *self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def set_precision(model: _Layer, level: str, *, keep_float32: Iterable[str | re.Pattern[str]] = ()) -> PolicyReport:
    """Set a level of precision on a model that exists: built or not, loaded, nested, subclassed, trained.

    The layers get the policies that they would have if they had been made under `tfmp.precision`, whatever they had
    before (of layers of your own, the activation is known if it stands in `self.activation`); layers that compute in
    integers or in float64 are left alone. So are layers that a functional model holds in an attribute and that its
    graph does not call, such as a preprocessor or a teacher. The weights stay as they are: float32. So "O0" after
    another level gives back the model in float32, bit for bit. After an error the model is as it was before.

    The model keeps its optimizer. `fit`, `evaluate` and `predict` trace it anew; a `tf.function` of your own that was
    traced before keeps the old types. At O1 and O2 in float16, `compile` then scales the loss; a model that is compiled
    without that already is warned of.

    A subclassed model must have its layers: call it on a batch first if it makes them then. Set the level on the model
    that you compile: a layer does not know which models it is in, so these would keep their traces.

    Args:
        model: A model, or a layer, of Keras 3, Keras 2.15 or tf_keras.
        level: "O0", "O1", "O2" or "O3"; with "-bfloat16" behind it for bfloat16.
        keep_float32: Names of layers, or regular expressions that match the whole name or the whole path (such as
            "encoder/dense"). These layers, and all that they hold, compute in float32. `keep_float32` of what
            `tfmp.check_precision` returns is such a list.

    Returns:
        What each layer computed in, and computes in now.

    Raises:
        TypeError: `model` is of no Keras; or an argument has another type.
        ValueError: There is no such level; the model has no layers yet; a pattern is no regular expression, or matches
            no layer; layers are quantized, or simulate that (as those of TensorFlow Model Optimization do, when they
            quantize or cluster weights); or the weights have another type than the level stores them in.

    Examples:
        >>> import keras
        >>> import tfmp
        >>> layers = [keras.layers.Dense(4, name="body"), keras.layers.Dense(2, name="head")]
        >>> model = keras.Sequential([keras.Input([3]), *layers], name="net")
        >>> print(tfmp.set_precision(model, "O2", keep_float32=["head"]))
        layer  before   O2
        net    float32  mixed_float16
        body   float32  mixed_float16
        head   float32  float32        in keep_float32

    Source: `apex.amp.initialize`, which sets a level on a model of torch.

    Provisional, but for the name and its first two arguments: a minor version may change what a level does to layers.
    """
    keras = keras_of(model, "layers.Layer")
    # In Keras 2, metrics are layers.
    if keras is None or isinstance(model, keras.metrics.Metric):
        raise TypeError(f"model must be a model or a layer of Keras, got {model!r} of type {type(model).__name__}.")
    new_level = level_of(level)
    patterns = lists.names("keep_float32", keep_float32, "names or regular expressions")
    inner_paths = {key: "/".join(path) for key, path in paths_within(keras, model).items()}
    paths = {id(model): model.name, **inner_paths}
    _refuse_without_layers(keras, model)
    by_id = {id(layer): layer for layer in layers_of(model)}
    called = {id(layer): layer for layer in called_layers_of(keras, model)}
    _refuse_quantized(keras, called.values())
    plan = _Plan(keras, new_level, _kept(patterns, inner_paths, by_id), set(called)).of(model)
    layers = {key: by_id[key] for key in plan}
    before = {key: _policy_name(keras, layer) for key, layer in layers.items()}
    changed = {key: layer for key, layer in layers.items() if plan[key].policy != before[key]}
    for key, layer in changed.items():
        _refuse_weights_of_another_type(keras, new_level, layer, paths[key], plan[key].policy)
    report = PolicyReport(
        level=str(new_level),
        layers=[LayerPolicy(paths[key], before[key], plan[key].policy, plan[key].reason) for key in layers],
    )
    wrap_keras()
    with contextlib.ExitStack() as undo:
        change_policies(
            keras,
            [(layer, plan[key].policy) for key, layer in changed.items()],
            called=list(called.values()),
            held=list(by_id.values()),
            undo=undo,
        )
        # A program may have made an error of the warning.
        warn_of_unscaled_loss(keras, model)
        undo.pop_all()
    return report


class _Planned(NamedTuple):
    """What a layer is to get."""

    #: The name of the policy.
    policy: str
    #: Why it is another one than that of the level; empty if it is that.
    reason: str


class _Plan:
    """Which layer is to get which policy.

    `kept` are the ids of the layers that the user keeps in float32, `called` those of the layers that calls of the
    model may reach.
    """

    def __init__(self, keras: ModuleType, level: Level, kept: set[int], called: set[int]) -> None:
        self._keras = keras
        self._level = level
        self._kept = kept
        self._called = called
        self._planned: dict[int, _Planned] = {}

    def of(self, model: _Layer) -> dict[int, _Planned]:
        """Return by the ids of the layers what they are to get. What Keras 2 makes of functions is left out."""
        self._visit(model, None)
        return self._planned

    def _visit(self, layer: _Layer, followed: _Planned | None) -> None:
        if id(layer) in self._planned or isinstance(layer, self._keras.layers.InputLayer):
            return
        planned = self._planned_for(layer, followed)
        if not is_function_of_tensorflow(self._keras, layer):
            self._planned[id(layer)] = planned
        for inner in layers_directly_in(layer):
            self._visit(inner, planned if _makes_its_layers(self._keras, layer) else followed)

    def _planned_for(self, layer: _Layer, followed: _Planned | None) -> _Planned:
        dtype = compute_dtype(self._keras, layer)
        if dtype not in ("float32", *HALF_TYPES_BY_NAME):
            return _Planned(_policy_name(self._keras, layer), f"computes in {dtype}")
        if id(layer) in self._kept:
            return _Planned("float32", "in keep_float32")
        if id(layer) not in self._called:
            return _Planned(_policy_name(self._keras, layer), "not called by the graph of the model that holds it")
        if followed is not None:
            return followed
        policy = policy_of(self._keras, type(layer), settings_of(layer), self._level)
        return _Planned(policy, "" if policy == self._level.policy else f"{self._level} keeps it in float32")


#: Layers of Keras that are given the layers in them.
_HOLDERS = ("Bidirectional", "Pipeline", "StackedRNNCells", "Wrapper")


def _makes_its_layers(keras: ModuleType, layer: _Layer) -> bool:
    """Return whether a layer is one of Keras that makes the layers in it, as `MultiHeadAttention` does."""
    of_keras = next(each for each in type(layer).__mro__ if each.__module__.split(".")[0] == keras.__name__)
    holders = tuple(getattr(keras.layers, name) for name in _HOLDERS if hasattr(keras.layers, name))
    # Subclasses of RNN, such as LSTM, make their cells.
    return of_keras not in (keras.layers.Layer, keras.layers.RNN) and not isinstance(layer, (keras.Model, *holders))


def _kept(patterns: Sequence[Any], inner_paths: dict[int, str], layers: dict[int, _Layer]) -> set[int]:
    """Return the ids of the layers that patterns match, and of all that these hold."""
    kept = set()
    for pattern in patterns:
        matching = {key for key, path in inner_paths.items() if _matches(pattern, path, layers[key].name)}
        if not matching:
            raise ValueError(
                f"keep_float32 has {_text(pattern)!r}, which matches no layer. The layers are "
                f"{', '.join(inner_paths.values()) or 'none: a layer that has no layers is kept by the level O0'}."
            )
        kept |= {id(held) for key in matching for held in layers_of(layers[key])}
    return kept


def _matches(pattern: Any, path: str, own_name: str) -> bool:  # noqa: ANN401 - a string or a compiled expression
    # In Keras 2, a layer's own name may have slashes, as those of TF-models have.
    names = {path, own_name, path.rpartition("/")[2]}
    if pattern in names:
        return True
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
        raise ValueError(f"keep_float32 has {pattern!r}, which is no regular expression: {error}.") from error


def _text(pattern: Any) -> str:  # noqa: ANN401 - a string or a compiled expression
    return pattern if isinstance(pattern, str) else str(pattern.pattern)


def _policy_name(keras: ModuleType, layer: _Layer) -> str:
    # A map of policies has a name of its own, so what is computed and stored is what tells.
    compute, variable = compute_dtype(keras, layer), variable_dtype(keras, layer)
    return compute if compute == variable else f"mixed_{compute}"


def _refuse_without_layers(keras: ModuleType, model: _Layer) -> None:
    if isinstance(model, keras.Model) and not layers_directly_in(model) and not own_weights(keras, model):
        raise ValueError(
            f"the model {model.name!r} has no layers yet: add them, or call it on a batch first, so that they get the "
            "level."
        )


def _refuse_quantized(keras: ModuleType, layers: Iterable[_Layer]) -> None:
    quantized = [layer.name for layer in layers if is_quantized(keras, layer)]
    if quantized:
        raise ValueError(
            f"the layers {', '.join(quantized)} are quantized, and compute in the types of that. Set the level before."
        )


def _refuse_weights_of_another_type(keras: ModuleType, level: Level, layer: _Layer, path: str, policy: str) -> None:
    """Refuse weights that exist in another type than a policy stores them in."""
    # Keras 2 stores those of batch normalization in float32 under each policy.
    if is_keras2(keras) and isinstance(layer, keras.layers.BatchNormalization):
        return
    expected = policy if policy in HALF_TYPES_BY_NAME else "float32"
    for weight in own_weights(keras, layer):
        stored = tf.as_dtype(weight.dtype).name
        if stored in ("float32", *HALF_TYPES_BY_NAME) and stored != expected:
            raise ValueError(
                f"the layer {path!r} has weights in {stored}, and would have them in {expected} at {level}. Make the "
                f"model in `with tfmp.precision('{level}')`, and give it the weights by set_weights."
            )
