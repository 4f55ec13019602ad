"""The tensors of a pass through probes, in eager code and in TF1 graphs."""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.ranges.check.names import by_name, told_apart
from tfmp.ranges.check.passes import PassTensors
from tfmp.ranges.probes import Probe
from tfmp.types import Gradients


def tensors_of_probes(
    loss: tf.Tensor, probes: Sequence[Probe], variables: Sequence[tf.Variable], grads: Gradients
) -> PassTensors:
    """Return the tensors of a run through probes.

    The gradients are those of the scaled loss for the probes, then those for the variables.
    """
    names = told_apart(variable.name.partition(":")[0] for variable in variables)
    return PassTensors(
        loss=loss,
        inputs={},
        outputs=by_name((probe.name, probe.tensor) for probe in probes),
        output_gradients=by_name(zip((probe.name for probe in probes), grads, strict=False)),
        weights=by_name(zip(names, map(tf.convert_to_tensor, variables), strict=True)),
        weight_gradients=by_name(zip(names, grads[len(probes) :], strict=True)),
    )
