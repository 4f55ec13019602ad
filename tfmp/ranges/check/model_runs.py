"""What runs of models of Keras, functions and graphs have in common: tensors by name, and what is measured of these."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfmp.core.gradients import arithmetic, measures
from tfmp.ranges.exponents import exponent_counts
from tfmp.ranges.histogram import RangeHistogram
from tfmp.types import Gradient

#: Tensors by the name of their layer, probe or variable, in the order in which the model reaches them.
Named = Mapping[str, Sequence[Gradient]]


class Precision(NamedTuple):
    """How a model is to compute in a run."""

    #: None for the types in which the model is trained.
    dtype: Literal["float16", "float32"] | None
    loss_scale: float
    #: The names of layers that compute in float32 although the others compute in float16.
    keep_float32: frozenset[str] = frozenset()


#: float32 has room enough for gradients as they are.
IN_FLOAT32 = Precision("float32", loss_scale=1.0)


class RunTensors(NamedTuple):
    """The tensors of a run; the gradients are those of the scaled loss."""

    #: Before it is scaled, a float32 scalar.
    loss: tf.Tensor
    #: What layers take; probes have none.
    inputs: Named
    #: What layers return, or the values of probes.
    outputs: Named
    output_gradients: Named
    #: The trained variables.
    weights: Named
    weight_gradients: Named
    #: Of what layers take, what Keras casts to the type in which they compute.
    cast_inputs: Named
    #: Of what layers return, what they have computed: no input, and nothing that a layer within returned.
    own_outputs: Named


#: What is measured by name in each run.
_KINDS = RunTensors._fields[1:]


class Measured(NamedTuple):
    """What is measured of the tensors of one name."""

    histogram: RangeHistogram
    #: The largest magnitude; NaN if a value is.
    largest: float

    @property
    def finite(self) -> bool:
        """Whether no value is infinite or NaN."""
        return self.histogram.nonfinite == 0


class ModelRun(NamedTuple):
    """What is measured of the tensors of a run, by the name of a layer, probe or variable."""

    loss: float
    inputs: dict[str, Measured]
    outputs: dict[str, Measured]
    output_gradients: dict[str, Measured]
    weights: dict[str, Measured]
    weight_gradients: dict[str, Measured]
    cast_inputs: dict[str, Measured]
    own_outputs: dict[str, Measured]
    #: The factor of all gradients here.
    loss_scale: float
    #: Those for the variables, as arrays.
    scaled_gradients: Mapping[str, Sequence[np.ndarray]]
    #: The names of the layers that return the model's outputs.
    returning: frozenset[str] = frozenset()

    @property
    def gradients(self) -> dict[str, list[np.ndarray]]:
        """The gradients for the variables as arrays, unscaled, in float64."""
        return {
            name: [np.asarray(grad, np.float64) / self.loss_scale for grad in grads]
            for name, grads in self.scaled_gradients.items()
        }


class Subject(Protocol):
    """Something that can be checked: a model of Keras, functions, or the tensors of a graph."""

    @property
    def has_float16(self) -> bool:
        """Whether it can compute in float16."""

    @property
    def needs_labels(self) -> bool:
        """Whether each batch must have labels, although `check_precision` was given no loss."""

    @property
    def keeps_float32(self) -> bool:
        """Whether layers of it can stay in float32 while the others compute in float16."""

    @property
    def already_float32(self) -> Sequence[str]:
        """The names of the layers that compute in float32 although others compute in half precision."""

    def failed_in(self, kept: Collection[str]) -> tuple[str, str] | None:
        """Return the name of the layer to keep in float32, too, after the error of the last run, and why; or None."""

    def run(self, batch: Any, precision: Precision) -> ModelRun:  # noqa: ANN401 - whatever the user's code takes
        """Run a batch, as the user gave it, forward and backward."""


def weighted_mean(values: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """Return the mean of losses times the weights of their examples, which have the first dimensions of the losses."""
    values = arithmetic.widen(tf.convert_to_tensor(values))
    if weights is not None:
        weights = tf.cast(weights, values.dtype)
        while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
            weights = weights[..., 0]
        while weights.shape.rank < values.shape.rank:
            weights = weights[..., tf.newaxis]
        values *= weights
    return tf.cast(tf.reduce_mean(values), tf.float32)


def by_name(named: Iterable[tuple[str, Any]]) -> Named:
    """Return the tensors of each name, in the order of the names' first use."""
    found: dict[str, list[Any]] = {}
    for name, tensor in named:
        found.setdefault(name, []).append(tensor)
    return found


def told_apart(names: Iterable[str]) -> list[str]:
    """Number the names that occur again, so that no two are the same: `kernel`, then `kernel (2)`."""
    numbers: Counter[str] = Counter()
    found = []
    for name in names:
        numbers[name] += 1
        found.append(name if numbers[name] == 1 else f"{name} ({numbers[name]})")
    return found


def measurements(tensors: RunTensors) -> dict[str, Any]:
    """Return the tensors of what `run_of` needs; in a graph they are fetched."""
    measured = {kind: {name: _measurement(found) for name, found in getattr(tensors, kind).items()} for kind in _KINDS}
    gradients = {name: list(map(_dense, grads)) for name, grads in tensors.weight_gradients.items()}
    return {"loss": tensors.loss, "gradients": gradients, **measured}


def run_of(values: Mapping[str, Any], loss_scale: float) -> ModelRun:
    """Return a run from the values, as NumPy arrays, of what `measurements` returned."""
    measured: dict[str, Any] = {
        kind: {name: Measured(RangeHistogram(counts), float(largest)) for name, (counts, largest) in found.items()}
        for kind, found in values.items()
        if kind in _KINDS
    }
    loss, gradients = float(values["loss"]), values["gradients"]
    return ModelRun(loss=loss, loss_scale=loss_scale, scaled_gradients=gradients, **measured)


def eager_run(tensors: RunTensors, loss_scale: float) -> ModelRun:
    """Return a run from its tensors, in eager code."""
    return run_of(tf.nest.map_structure(lambda tensor: tensor.numpy(), measurements(tensors)), loss_scale)


def _measurement(tensors: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    counts = exponent_counts(tensors) if tensors else exponent_counts([None])
    return tf.reduce_sum(counts, axis=0), measures.max_abs(tensors)


def _dense(grad: Gradient) -> tf.Tensor:
    # A variable without a gradient stays in its place, as an empty tensor.
    return tf.zeros([0]) if grad is None else arithmetic.widen(arithmetic.densify(grad))


class Totals:
    """What was measured in the runs of all batches, by kind and then by name."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, Measured]] = {kind: {} for kind in _KINDS}

    def add(self, run: ModelRun) -> None:
        """Add the run of a batch."""
        for kind, totals in self.of.items():
            for name, measured in getattr(run, kind).items():
                if name not in totals:
                    totals[name] = measured
                elif kind != "weights":  # which are the same in all batches
                    totals[name] = _together(totals[name], measured)

    def histogram(self, kind: str, name: str) -> RangeHistogram:
        """Return what was counted of a layer; nothing if it has no such tensors."""
        found = self.of[kind].get(name)
        return RangeHistogram() if found is None else found.histogram

    def all_gradients(self, without: Collection[str] = ()) -> RangeHistogram:
        """Return the histogram of the gradients of activations and weights, leaving out those of some layers.

        If no gradient other than 0 would be left, all are counted.
        """
        kinds = (self.of["output_gradients"], self.of["weight_gradients"])
        left = [each.histogram for kind in kinds for name, each in kind.items() if name not in without]
        found = sum(left, start=RangeHistogram())
        return found if found.exponents or not without else self.all_gradients()

    def names(self) -> list[str]:
        """Return the names of layers, probes and variables, in the order in which they were reached."""
        return list(dict.fromkeys(name for kind in ("outputs", "weights") for name in self.of[kind]))


def _together(one: Measured, other: Measured) -> Measured:
    # np.maximum, unlike max, is NaN if either is.
    return Measured(one.histogram + other.histogram, float(np.maximum(one.largest, other.largest)))
