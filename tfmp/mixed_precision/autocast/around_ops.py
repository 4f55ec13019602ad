"""Gives ops their types in a scope: what stands around the functions of TensorFlow that make ops.

Each function here takes one of TensorFlow and returns what replaces it while a scope is open.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmp.core.gradients.arithmetic import HALF_TYPES
from tfmp.mixed_precision.autocast import state
from tfmp.mixed_precision.autocast.op_types import FLOATS, cast_float, flat, has_type, mark_as_weight, widest

_Function = Callable[..., Any]


def around_eager_ops(execute: _Function) -> _Function:
    """Give the ops of eager code their types.

    Args:
        execute: Makes an op in eager code.
    """

    def replaced(context: Any, op: str, name: Any, *values: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        if scope is None or op == "Cast":
            return execute(context, op, name, *values)
        given = scope.op_types.cast_in_order(op, values, _cast_in(scope))
        try:
            result = execute(context, op, name, *given)
        except Exception:
            # Where TensorFlow has a list to convert, say, the function that was called goes on with its own inputs.
            pairs = [*zip(values, given, strict=True), *zip(flat(values), flat(given), strict=True)]
            state.remember_casts({id(one): (one, other) for one, other in pairs})
            raise
        if scope.op_types.makes_weights(op, given):
            mark_as_weight(result)
        return result

    return replaced


def around_eager_inputs(match: _Function) -> _Function:
    """Give eager ops their types where TensorFlow converts their inputs first.

    Args:
        match: Converts inputs to tensors of one type.
    """

    @functools.wraps(match)
    def replaced(inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        casts = state.remembered_casts() if state.current() is not None else {}
        return match([casts.get(id(each), (each, each))[1] for each in inputs] if casts else inputs, *args, **kwargs)

    return replaced


def around_eager_results(execute: _Function) -> _Function:
    """Forget what was cast for an op that is made now, and remember what is a weight.

    Args:
        execute: Makes an op in eager code whose inputs TensorFlow converted.
    """

    @functools.wraps(execute)
    # With the names of TensorFlow, which passes some of them by name.
    def replaced(op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: Any = None) -> Any:  # noqa: ANN401
        state.remember_casts({})
        results = execute(op_name, num_outputs, inputs, attrs, ctx, name)
        scope = state.current()
        if scope is not None and scope.op_types.makes_weights(tf.compat.as_str(op_name), inputs):
            mark_as_weight(results)
        return results

    return replaced


def around_graph_ops(apply_op: _Function) -> _Function:
    """Give the ops of graphs their types.

    Args:
        apply_op: Makes an op in a graph.
    """

    def replaced(op: str, name: Any = None, **values: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        if scope is None or op == "Cast":
            return apply_op(op, name, **values)
        return apply_op(op, name, **scope.op_types.cast_by_name(op, values, _cast_in(scope)))

    return replaced


def _cast(value: Any, dtype: tf.DType) -> tf.Tensor:  # noqa: ANN401 - whatever TensorFlow takes for a tensor
    # In eager code, half of the time of tf.cast goes into kinds of values that no op takes.
    return tf.raw_ops.Cast(x=value, DstT=dtype)


def _cast_in(scope: state.Scope) -> _Function:
    return _refuse if scope.is_around_trace else _cast


def _refuse(value: Any, dtype: tf.DType) -> Any:  # noqa: ANN401 - whatever TensorFlow takes for a tensor
    raise RuntimeError(
        f"a tf.function is traced within tfmp.autocast, which would cast {value} to {dtype.name} in this trace, and so "
        "in all later calls of the function, inside and outside of the scope. Enter the scope inside of the function: "
        "decorate it with @tf.function first, and with @tfmp.autocast() below that."
    )


def around_conversion(convert: _Function) -> _Function:
    """Cast tensors to the type that they are asked for, where TensorFlow refuses that.

    Args:
        convert: Returns a value as a tensor, of a type that may be given.
    """

    @functools.wraps(convert)
    def replaced(value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in TensorFlow
        scope = state.current()
        if scope is None or scope.is_around_trace:
            return convert(value, dtype, *args, **kwargs)
        if dtype is None and isinstance(value, list | tuple):
            # By itself, TensorFlow takes the type of the first tensor in graphs.
            types = {each.dtype.base_dtype for each in value if isinstance(each, tf.Tensor)}
            dtype = widest(types) if len(types) > 1 and types <= FLOATS else None
        elif dtype is not None and has_type(value):
            asked, own = tf.as_dtype(dtype).base_dtype, tf.as_dtype(value.dtype).base_dtype
            if own != asked and own in FLOATS and asked in FLOATS:
                return tf.cast(convert(value), asked)
        return convert(value, dtype, *args, **kwargs)

    return replaced


def around_division(divide: _Function) -> _Function:
    """Let a quotient have operands of several types, which TensorFlow compares before it makes the op.

    Args:
        divide: Divides tensors.
    """

    @functools.wraps(divide)
    def replaced(x: Any, y: Any, name: str | None = None) -> Any:  # noqa: ANN401 - tensors, numbers
        scope = state.current()
        if scope is not None:
            x, y = scope.op_types.cast_in_order("RealDiv", [x, y], _cast_in(scope))
        return divide(x, y, name)

    return replaced


def widened(function: _Function) -> _Function:
    """Give a function float32 that would cast its results back to half precision.

    Args:
        function: The function, such as that of moments.
    """

    def as_float32(value: Any, cast: _Function) -> Any:  # noqa: ANN401 - any argument
        is_half = isinstance(value, tf.Tensor) and value.dtype in HALF_TYPES
        return cast(value, tf.float32) if is_half else value

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        if scope is not None:
            cast = _cast_in(scope)
            args = tuple(as_float32(each, cast) for each in args)
            kwargs = {name: as_float32(each, cast) for name, each in kwargs.items()}
        return function(*args, **kwargs)

    return replaced


def around_array_writes(write: _Function) -> _Function:
    """Cast what is written to a `TensorArray` to the type of the array.

    Args:
        write: A method of `TensorArray` that writes tensors.
    """

    @functools.wraps(write)
    def replaced(array: tf.TensorArray, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()

        if scope is not None and not scope.is_around_trace:
            args = tuple(cast_float(each, array.dtype) for each in args)
            kwargs = {name: cast_float(each, array.dtype) for name, each in kwargs.items()}
        return write(array, *args, **kwargs)

    return replaced
