"""A call in eager code that runs as a graph, so that it is known what it does before it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.tensorflow_internals import is_watched, unoptimized, unrecorded
from tfmp.recomputation.structure import Tensors, is_differentiable


class Trace:
    """A function of tensors that is traced anew, and runs unseen by the tapes of eager code.

    Only tapes outside of the function are stopped. In eager code no tape could be told from another; but a tape that
    the function itself opens records the graph while it is traced. The function may make variables in its first run. Of
    `inputs`, only the types and shapes matter.

    Examples:
        >>> trace = Trace(lambda inputs: {"y": inputs[0] * 2.0, "name": "double"}, [tf.constant(2.0)])
        >>> "Mul" in {op.type for op in trace.operations}
        True
        >>> results = trace.run([tf.constant(3.0)])
        >>> float(results["y"]), results["name"]
        (6.0, 'double')
    """

    def __init__(self, function: Callable[[Sequence[tf.Tensor]], object], inputs: Sequence[tf.Tensor]) -> None:
        def tensors_of(*tensors: tf.Tensor) -> list[tf.Tensor]:
            self._results = Tensors(function(tensors))
            return self._results.tensors

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
        self._traced = tf.function(tensors_of).get_concrete_function(*specs)

    @property
    def operations(self) -> list[tf.Operation]:
        """The ops of the graph."""
        operations: list[tf.Operation] = self._traced.graph.get_operations()
        return operations

    def captured(self) -> list[tf.Tensor | tf.Variable]:
        """Return what the function uses beside its inputs and a tape watches, except for trainable variables."""
        tensors = [each for each in self._traced.captured_inputs if is_differentiable(each)]
        constants = [each for each in self._traced.variables if not each.trainable and each.dtype.is_floating]
        return [*filter(is_watched, tensors), *(each for each in constants if is_watched(each.handle))]

    def run(self, inputs: Sequence[tf.Tensor]) -> Any:  # noqa: ANN401 - what the function returns
        """Return what the function returns, with tensors of eager code."""
        for variable in self._traced.trainable_variables:
            # For what notes variables: a graph does not tell which it reads.
            tf.convert_to_tensor(variable)
        # It runs once. Optimizing it would take longer than that, and round otherwise than the second computation, in
        # eager code.
        with unrecorded(), unoptimized():
            return self._results.packed(self._traced(*inputs))
