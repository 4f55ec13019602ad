"""One pass of a batch through a model, forward and backward: its tensors by name, and what is measured of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.exponents import exponent_counts
from tfmp.core.gradients.norms import max_abs
from tfmp.ranges.histogram import RangeHistogram
from tfmp.types import Gradient

#: Tensors by the name of their layer, probe or variable, in the order in which the model reaches them.
Named = Mapping[str, Sequence[Gradient]]


class Precision(NamedTuple):
    """How a model is to compute in a pass."""

    #: None for the types in which the model is trained.
    dtype: Literal["float16", "float32"] | None
    loss_scale: float
    #: The names of layers that compute in float32 although the others compute in float16.
    keep_float32: frozenset[str] = frozenset()


#: float32 has room enough for gradients as they are.
IN_FLOAT32 = Precision("float32", loss_scale=1.0)


class PassTensors(NamedTuple):
    """The tensors of a pass; the gradients are those of the scaled loss."""

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


class Measured(NamedTuple):
    """What is measured of the tensors of one name."""

    histogram: RangeHistogram
    #: The largest magnitude; NaN if a value is.
    largest: float

    @property
    def finite(self) -> bool:
        """Whether no value is infinite or NaN."""
        return self.histogram.nonfinite == 0


class Pass(NamedTuple):
    """What is measured of the tensors of a pass, by the name of a layer, probe or variable."""

    loss: float
    inputs: dict[str, Measured]
    outputs: dict[str, Measured]
    output_gradients: dict[str, Measured]
    weights: dict[str, Measured]
    weight_gradients: dict[str, Measured]
    #: The factor of all gradients here.
    loss_scale: float
    #: Those for the variables, as arrays.
    scaled_gradients: Mapping[str, Sequence[np.ndarray]]

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
    def keeps_float32(self) -> bool:
        """Whether layers of it can stay in float32 while the others compute in float16."""

    def holders(self, names: Collection[str]) -> Iterator[dict[str, str]]:
        """Yield the names of what holds some layers, and could stay in float32, each with the name of one of these.

        What holds the layers directly comes first.
        """

    def run(self, batch: Any, precision: Precision) -> Pass:  # noqa: ANN401 - whatever the user's code takes
        """Run a batch, as the user gave it, forward and backward."""


def measurements(tensors: PassTensors) -> dict[str, Any]:
    """Return the tensors of what `pass_of` needs; in a graph they are fetched."""
    measured = {
        kind: {name: _measurement(found) for name, found in getattr(tensors, kind).items()}
        for kind in PassTensors._fields[1:]
    }
    gradients = {name: list(map(_dense, grads)) for name, grads in tensors.weight_gradients.items()}
    return {"loss": tensors.loss, "gradients": gradients, **measured}


def pass_of(values: Mapping[str, Any], loss_scale: float) -> Pass:
    """Return a pass from the values, as NumPy arrays, of what `measurements` returned."""
    measured = {
        kind: {name: Measured(RangeHistogram(counts), float(largest)) for name, (counts, largest) in found.items()}
        for kind, found in values.items()
        if kind not in ("loss", "gradients")
    }
    loss, gradients = float(values["loss"]), values["gradients"]
    return Pass(loss=loss, loss_scale=loss_scale, scaled_gradients=gradients, **measured)


def _measurement(tensors: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    counts = exponent_counts(tensors) if tensors else exponent_counts([None])
    return tf.reduce_sum(counts, axis=0), max_abs(tensors)


def _dense(grad: Gradient) -> tf.Tensor:
    # A variable without a gradient stays in its place, as an empty tensor.
    return tf.zeros([0]) if grad is None else arithmetic.widen(arithmetic.densify(grad))
