"""Recomputation in eager code, where the ops of a function are known only from a trace of it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.tensorflow_internals import gradients_may_be_recorded
from tfmp.recomputation.functions.call import Call
from tfmp.recomputation.functions.second_run import no_new_variables
from tfmp.recomputation.gradient import recomputed_results
from tfmp.recomputation.stateful_ops import refuse_state
from tfmp.recomputation.structure import Differentiable
from tfmp.recomputation.trace import Trace


class EagerCalls:
    """The eager calls of one recomputed function.

    While a tape records, the function is traced at each call, because it may capture something else each time, and the
    first run is that of the trace. Otherwise it is traced once for each kind of call, only to look at its ops.

    Examples:
        >>> x = tf.constant(3.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = EagerCalls().results(Call(lambda x: x**2, (x,), {}))
        >>> float(y), float(tape.gradient(y, x))
        (9.0, 6.0)
    """

    def __init__(self) -> None:
        self._checked: set[Hashable] = set()

    def results(self, call: Call) -> Any:  # noqa: ANN401 - what the function returns
        """Return the results of a call, whose gradients compute it again."""
        if not gradients_may_be_recorded():
            self._check(call)
            return call.results(call.inputs).structure
        trace = _checked_trace(call)

        def first_call(inputs: Sequence[tf.Tensor]) -> Differentiable:
            return Differentiable(trace.run(inputs))

        def second_call(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            with no_new_variables(call.name):
                return call.tensors(inputs)

        results, outputs = recomputed_results(first_call, second_call, call.inputs, trace.captured())
        return results.packed(outputs)

    def _check(self, call: Call) -> None:
        kind = call.kind()
        if kind is None or kind not in self._checked:
            _checked_trace(call)
            if kind is not None:
                self._checked.add(kind)


def _checked_trace(call: Call) -> Trace:
    try:
        trace = Trace(_making_variables_once(call), call.inputs)
    except Exception as error:
        if "on its second run" in str(error):
            raise
        raise ValueError(
            f"{call.name} cannot be recomputed in eager code, because tf.function cannot trace it, so nobody knows "
            f"whether it computes the same twice: {error} Leave out what only eager code can do, such as .numpy() or "
            "float(tensor)."
        ) from error
    refuse_state(trace.operations, call.name)
    return trace


def _making_variables_once(call: Call) -> Callable[[Sequence[tf.Tensor]], object]:
    runs: list[None] = []

    def run(inputs: Sequence[tf.Tensor]) -> object:
        runs.append(None)
        if len(runs) == 1:
            return call.results(inputs).structure
        # A `tf.function` traces again what makes variables.
        with no_new_variables(call.name):
            return call.results(inputs).structure

    return run
