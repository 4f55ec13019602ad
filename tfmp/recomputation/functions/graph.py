"""Recomputation in graphs, those of `tf.function` and those of TF1."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.gradients.arithmetic import densify
from tfmp.core.tensorflow_internals import variables_used_by, within_loop_of_tf1
from tfmp.recomputation.captures import captured_tensors
from tfmp.recomputation.functions.call import Call
from tfmp.recomputation.functions.second_run import VariablesOfFirstRun, collections_unchanged
from tfmp.recomputation.gradient import TensorFunction, all_at_once, recomputed
from tfmp.recomputation.stateful_ops import refuse_state


def results_in_graph(call: Call) -> Any:  # noqa: ANN401 - what the function returns
    """Add a call to the current graph, such that its gradients compute it again, and return the function's results.

    Examples:
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     x = tf.constant(3.0)
        ...     y = results_in_graph(Call(lambda x: x**2, (x,), {}))
        ...     [float(value) for value in session.run([y, *tf.gradients(y, x)])]
        [9.0, 6.0]
    """
    if within_loop_of_tf1():
        raise ValueError(
            f"{call.name} cannot be recomputed in the body of a tf.while_loop of TF1, whose gradients have no place "
            "for a second run. Call tf.compat.v1.enable_control_flow_v2() before the graph is built."
        )
    graph = tf.compat.v1.get_default_graph()
    variables = VariablesOfFirstRun(call.name)
    before = len(graph.get_operations())
    with tf.GradientTape() as tape, variables.noted():
        results = call.results(call.inputs)
    added = graph.get_operations()[before:]

    def second_call(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with variables.replayed(), collections_unchanged():
            return call.tensors(inputs)

    if tf.inside_function():
        refuse_state([op for op in added if op.name not in variables.initializers], call.name)
        constants = _constant_variables(graph, added)
        captured = [
            *captured_tensors(graph, added, call.inputs, results.tensors),
            *tape.watched_variables(),
            *constants,
        ]
        return results.packed(recomputed(second_call, call.inputs, captured, lambda _: results.tensors))
    needed = _needed(added, results.tensors)
    refuse_state(needed, call.name)
    sources = [*captured_tensors(graph, needed, call.inputs, results.tensors), *_variables_of(needed)]
    return results.packed(_recomputed_in_v1(second_call, call.inputs, results.tensors, sources))


def _recomputed_in_v1(
    function: TensorFunction, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Give outputs, which were computed from inputs and sources, a gradient that computes them again.

    `tf.GradientTape` does not know the reference variables of TF1, so the gradients are those of `tf.gradients`.
    """
    unchanged = len(outputs)

    def with_gradient(*tensors: tf.Tensor) -> tuple[Sequence[tf.Tensor], Callable[..., object]]:
        def gradient(*output_grads: tf.Tensor) -> list[object]:
            awaited = [densify(grad) for grad in output_grads]
            # Without this a session would run the second computation together with the first, or merge both into one.
            with tf.control_dependencies(awaited):
                late_inputs = [tf.identity(tensor) for tensor in inputs]
                outputs_again = function(late_inputs)
            # The gradients of what the inputs and sources were computed from are computed outside of this call.
            within = [*late_inputs, *sources]
            grads = all_at_once(tf.gradients(outputs_again, within, awaited, stop_gradients=within))
            return [*[None] * unchanged, *grads]

        return [tf.identity(tensor) for tensor in tensors[:unchanged]], gradient

    # The outputs are arguments too: TensorFlow would look behind them for variables, and not know what it finds.
    values = [_value(source) for source in sources]
    return list(tf.custom_gradient(with_gradient)(*outputs, *inputs, *values)) if outputs else []


def _needed(added: Sequence[tf.Operation], outputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Return those ops among the added ones that the outputs depend on. Only these does a session run twice."""
    names = {op.name for op in added}
    needed: dict[str, tf.Operation] = {}
    waiting = [tensor.op for tensor in outputs]
    while waiting:
        op = waiting.pop()
        if op.name in names and op.name not in needed:
            needed[op.name] = op
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return list(needed.values())


def _constant_variables(graph: tf.Graph, operations: Iterable[tf.Operation]) -> list[tf.Variable]:
    """Return the variables that ops of a function's graph read and that no tape watches by itself."""
    read = {tensor.name for op in operations for tensor in op.inputs}
    handles = {original.ref() for original, copy in graph.captures if copy.name in read}
    constants = [
        variable for variable in variables_used_by(graph) if not variable.trainable and variable.dtype.is_floating
    ]
    return [variable for variable in constants if variable.handle.ref() in handles]


def _variables_of(operations: Iterable[tf.Operation]) -> list[tf.Tensor]:
    """Return the references and handles of the variables of TF1 that ops make or use."""
    used = [tensor for op in operations for tensor in (*op.inputs, *op.outputs)]
    variables = {tensor.ref(): tensor for tensor in used if tensor.op.type in {"VariableV2", "VarHandleOp"}}
    return [tensor for tensor in variables.values() if _value_type(tensor).is_floating]


def _value_type(variable: tf.Tensor) -> tf.DType:
    return tf.as_dtype(variable.op.get_attr("dtype"))


def _value(source: tf.Tensor) -> tf.Tensor:
    if source.dtype != tf.resource:
        return source
    return tf.raw_ops.ReadVariableOp(resource=source, dtype=_value_type(source))
