"""The gradient of a pure function that is computed a second time, because its activations were not kept."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import tensorflow as tf

from tfmp.core.gradients.arithmetic import densify
from tfmp.core.tensorflow_internals import is_watched, unrecorded, within_xla
from tfmp.recomputation.captures import captured_tensors, refuse_watched
from tfmp.recomputation.trace import Trace

#: A function of floating-point tensors with floating-point results. It is called twice, and must return the same values
#: both times; whatever else it needs, it captures.
TensorFunction: TypeAlias = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


class Results(Protocol):
    """What a call returned, of which some are floating-point tensors."""

    @property
    def tensors(self) -> Sequence[tf.Tensor]:
        """The floating-point tensors."""


FirstResults = TypeVar("FirstResults", bound=Results)


def recomputed(
    function: TensorFunction,
    inputs: Sequence[tf.Tensor],
    captured: Sequence[tf.Tensor | tf.Variable] = (),
    first_call: TensorFunction | None = None,
) -> list[tf.Tensor]:
    """Call a function such that its activations are not kept until the gradients are computed.

        forward     outputs = function(inputs)           keeps the inputs only
        backward    outputs = function(inputs)           again, now with a tape
                    gradients of outputs, with respect to the inputs and to the variables that the function read

    This is for eager code and `tf.function`, also within XLA. Second derivatives are computed in the same way.
    `captured` is what else the function uses and gradients may be asked for; trainable variables that the function
    reads in its first call need not be listed. `first_call`, if it is given, is what to call the first time.

    Examples:
        >>> x, w = tf.constant(3.0), tf.Variable(2.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     (y,) = recomputed(lambda inputs: [w * inputs[0] ** 2], [x])
        >>> [float(grad) for grad in tape.gradient(y, [x, w])]
        [12.0, 9.0]

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); `tf.recompute_grad`.
    """

    def with_gradient(*tensors: tf.Tensor) -> tuple[Sequence[tf.Tensor], Callable[..., object]]:
        inputs = tensors[: len(tensors) - len(captured)]

        def gradient(*output_grads: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> object:
            awaited = [densify(grad) for grad in output_grads]
            with tf.GradientTape() as tape:
                late_inputs = _after(awaited, inputs)
                tape.watch([late_inputs, captured, variables])
                outputs = function(late_inputs)
            grads = all_at_once(tape.gradient(outputs, [*late_inputs, *captured, *variables], awaited))
            # TensorFlow expects two lists only if the function read variables.
            return (grads[: len(tensors)], grads[len(tensors) :]) if variables else grads

        return (first_call or function)(_unwatched(inputs)), gradient

    values = [tf.convert_to_tensor(each) for each in captured]
    return list(tf.custom_gradient(with_gradient)(*inputs, *values))


def recomputed_results(
    first_call: Callable[[Sequence[tf.Tensor]], FirstResults],
    second_call: TensorFunction,
    inputs: Sequence[tf.Tensor],
    captured: Sequence[tf.Tensor | tf.Variable] = (),
) -> tuple[FirstResults, list[tf.Tensor]]:
    """Call a function like `recomputed`; return all that it returned, and the tensors to put in place of those in it.

    `first_call` is what to call the first time. It may use nothing beside its inputs and what is `captured` that a tape
    watches, except for trainable variables. `second_call` is called the second time, and returns the floating-point
    tensors only. Tapes keep it until then, so it should not refer to what the first call returned.

    Examples:
        >>> from tfmp.recomputation.structure import Differentiable
        >>> call = lambda inputs: Differentiable((inputs[0] ** 2, "name"))
        >>> results, tensors = recomputed_results(call, lambda inputs: call(inputs).tensors, [tf.constant(3.0)])
        >>> float(tensors[0]), results.packed(tensors)[1]
        (9.0, 'name')
    """
    returned: list[FirstResults] = []

    def first_tensors(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        num_before = len(graph.get_operations())
        returned.append(first_call(tensors))
        results = returned[0].tensors
        if not tf.executing_eagerly():
            refuse_watched(captured_tensors(graph, graph.get_operations()[num_before:], tensors, results))
        elif any(map(is_watched, results)):
            # The inputs are not, so there is something else: variables, which do no harm, or what only a trace tells.
            refuse_watched(Trace(lambda inputs: first_call(inputs).tensors, tensors).captured())
        return results

    tensors = recomputed(second_call, inputs, captured, first_tensors)
    return returned[0], tensors


def all_at_once(grads: Sequence[tf.Tensor | None]) -> Sequence[tf.Tensor | None]:
    """Return the gradients of a second call, none of which a graph uses before all are computed.

    Otherwise the update of one variable could come before the second call has read it for the gradient of another. A
    session does not order them. A `tf.function` does, but Grappler may lose the order: it takes out a control edge
    beside a path through an IdentityN (`all_reduce` and custom gradients add these), and then the IdentityN too.
    """
    return tf.tuple(grads) if any(grad is not None for grad in grads) else grads


def _unwatched(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return copies of the inputs in eager code, such that a tape outside does not record, and keep, what uses them.

    It cannot be stopped instead: a tape that the function itself opens would be stopped too.
    """
    if not tf.executing_eagerly():
        return list(inputs)
    with unrecorded():
        return [tf.identity(tensor) for tensor in inputs]


def _after(awaited: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return copies of tensors that a graph computes after the awaited ones; so what uses them is computed late too.

    Without this a graph would run the second computation together with the first, or merge both into one.
    """
    with tf.control_dependencies(awaited):
        if not within_xla():
            return [tf.identity(tensor) for tensor in tensors]
    # XLA ignores control dependencies. It does not find out that the condition, which depends on an awaited value, is
    # always true: a magnitude is at most infinite, or is none.
    first = tf.reduce_max(tf.abs(tf.reshape(awaited[0], [-1])[:1]))
    always = tf.logical_or(first <= float("inf"), tf.math.is_nan(first))
    return [tf.where(always, tensor, tf.zeros_like(tensor)) for tensor in tensors]
