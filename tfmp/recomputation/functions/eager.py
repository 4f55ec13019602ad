"""Recomputation in eager code, where the ops of a function are known only from a trace of it."""

from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.tracing import is_watched
from tfmp.recomputation.functions.call import Call
from tfmp.recomputation.functions.second_run import no_new_variables
from tfmp.recomputation.gradient import recomputed_results
from tfmp.recomputation.stateful_ops import refuse_state
from tfmp.recomputation.structure import is_differentiable


class EagerCalls:
    """The eager calls of one recomputed function.

    The function is traced once for each kind of call, only to look at its ops and at what it captures. If it captures
    tensors, it is traced at each call, because these may be others each time.

    Examples:
        >>> x = tf.constant(3.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = EagerCalls().results(Call(lambda x: x**2, (x,), {}))
        >>> float(y), float(tape.gradient(y, x))
        (9.0, 6.0)
    """

    def __init__(self) -> None:
        self._capture_nothing: set[Hashable] = set()

    def results(self, call: Call) -> Any:  # noqa: ANN401 - what the function returns
        """Return the results of a call, whose gradients compute it again.

        Raises:
            ValueError: If it cannot be computed a second time.
        """

        def again(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            with no_new_variables(call.name):
                return call.tensors(inputs)

        results, outputs = recomputed_results(call.results, again, call.inputs, self._watched(call))
        return results.packed(outputs)

    def _watched(self, call: Call) -> list[tf.Tensor | tf.Variable]:
        """Return what the function captures and a gradient may be asked for, and check that it can be recomputed."""
        kind = call.kind()
        if kind is not None and kind in self._capture_nothing:
            return []
        traced = _traced(call)
        refuse_state(traced.graph.get_operations(), call.name)
        tensors = [tensor for tensor in traced.captured_inputs if is_differentiable(tensor)]
        # The tape of the gradient finds the trainable ones itself.
        constants = [each for each in traced.variables if not each.trainable and each.dtype.is_floating]
        if kind is not None and not tensors and not constants:
            self._capture_nothing.add(kind)
        return [
            *(tensor for tensor in tensors if is_watched(tensor)),
            *(variable for variable in constants if is_watched(variable.handle)),
        ]


def _traced(call: Call) -> Any:  # noqa: ANN401 - a concrete function of TensorFlow
    def twice(*inputs: tf.Tensor) -> None:
        call.results(inputs)
        with no_new_variables(call.name):
            call.results(inputs)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in call.inputs]
    try:
        return tf.function(twice).get_concrete_function(*specs)
    except Exception as error:
        if "on its second run" in str(error):
            raise
        raise ValueError(
            f"{call.name} cannot be recomputed in eager code, because tf.function cannot trace it, so nobody knows "
            f"whether it computes the same twice: {error} Leave out what only eager code can do, such as .numpy() or "
            "float(tensor)."
        ) from error
