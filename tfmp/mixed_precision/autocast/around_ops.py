"""Gives ops their types in a scope: what stands around the functions of TensorFlow that make ops.

Each function here takes one of TensorFlow and returns what replaces it while a scope is open.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES
from tfmp.mixed_precision.autocast import state
from tfmp.mixed_precision.autocast.op_types import (
    FLOATS,
    cast_float,
    flat,
    has_type,
    mark_as_gate,
    mark_as_weight,
    widest,
)

_Function = Callable[..., Any]


def around_eager_ops(execute: _Function) -> _Function:
    """Give the ops of eager code their types."""

    def replaced(context: Any, op: str, name: Any, *values: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        if scope is None or op == "Cast":
            return execute(context, op, name, *values)
        cast_values = scope.op_types.cast_in_order(op, values, _cast_in(scope))
        try:
            result = execute(context, op, name, *cast_values)
        except Exception:
            # Where TensorFlow has a list to convert, say, the function that was called goes on with its own inputs.
            pairs = [*zip(values, cast_values, strict=True), *zip(flat(values), flat(cast_values), strict=True)]
            state.remember_casts({id(one): (one, other) for one, other in pairs})
            raise
        _mark(scope, op, cast_values, result, is_cast=cast_values is not values)
        return result

    return replaced


def _mark(scope: state.Scope, op: str, values: Any, results: Any, *, is_cast: bool) -> None:  # noqa: ANN401 - as an op has
    """Mark the results of an op of eager code that are weights or gates, which do not make other ops wider."""
    if scope.op_types.makes_weights(op, values):
        mark_as_weight(results)
    elif scope.op_types.makes_gates(op, values, is_cast=is_cast):
        mark_as_gate(results)


def around_eager_inputs(match: _Function) -> _Function:
    """Give eager ops their types where TensorFlow converts their inputs to tensors of one type first."""

    @functools.wraps(match)
    def replaced(inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        casts = state.remembered_casts() if state.current() is not None else {}
        return match([casts.get(id(each), (each, each))[1] for each in inputs] if casts else inputs, *args, **kwargs)

    return replaced


def around_eager_results(execute: _Function) -> _Function:
    """Forget the casts for an op that is made now, and mark its results if they are not to make other ops wider.

    `execute` makes an op in eager code whose inputs TensorFlow converted.
    """

    @functools.wraps(execute)
    # With the names of TensorFlow, which passes some of them by name.
    def replaced(op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: Any = None) -> Any:  # noqa: ANN401
        casts = state.remembered_casts()
        state.remember_casts({})
        results = execute(op_name, num_outputs, inputs, attrs, ctx, name)
        scope = state.current()
        if scope is not None:
            is_cast = any(one is not other for one, other in casts.values())
            _mark(scope, tf.compat.as_str(op_name), inputs, results, is_cast=is_cast)
        return results

    return replaced


def around_graph_ops(apply_op: _Function) -> _Function:
    """Give the ops of graphs their types."""

    def replaced(op: str, name: Any = None, **values: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        if scope is None or op == "Cast":
            return apply_op(op, name, **values)
        cast_values = scope.op_types.cast_by_name(op, values, _cast_in(scope))
        result = apply_op(op, name, **cast_values)
        if scope.op_types.makes_gates(op, list(cast_values.values()), is_cast=cast_values is not values):
            mark_as_gate(result[-1])
        return result

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
    """Cast tensors to the type that they are asked for, where TensorFlow refuses that."""

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
            asked, present = tf.as_dtype(dtype).base_dtype, tf.as_dtype(value.dtype).base_dtype
            if present != asked and present in FLOATS and asked in FLOATS:
                return tf.cast(convert(value), asked)
        return convert(value, dtype, *args, **kwargs)

    return replaced


def around_errors(dispatch: _Function) -> _Function:
    """Call functions again in float32 that refuse half precision, or a mixture of types, in Python.

    TensorFlow calls `dispatch` where one of its functions raised a TypeError or a ValueError, to find another one.
    """

    @functools.wraps(dispatch)
    def replaced(op: _Function, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        arguments = tf.nest.flatten([args, kwargs]) if scope is not None else []
        # What the user's function did, it would do twice.
        if scope is not None and any(map(_is_half, arguments)) and not any(map(callable, arguments)):
            types = {_float_type(each) for each in arguments} - {None}
            wide = functools.partial(_widened, cast=_cast_in(scope), dtype=widest(types | {tf.float32}))
            # An error that has other causes is raised as it was.
            with contextlib.suppress(TypeError, ValueError):
                return op(*tf.nest.map_structure(wide, args), **tf.nest.map_structure(wide, kwargs))
        return dispatch(op, args, kwargs)

    return replaced


def around_division(divide: _Function) -> _Function:
    """Let a quotient have operands of several types, which TensorFlow compares before it makes the op."""

    @functools.wraps(divide)
    def replaced(x: Any, y: Any, name: str | None = None) -> Any:  # noqa: ANN401 - tensors, numbers
        scope = state.current()
        if scope is not None:
            x, y = scope.op_types.cast_in_order("RealDiv", [x, y], _cast_in(scope))
        return divide(x, y, name)

    return replaced


def around_sparse_products(multiply: _Function) -> _Function:
    """Multiply matrices of bfloat16 and float32 as others: TensorFlow takes the product of sparse matrices for them."""

    @functools.wraps(multiply)
    def replaced(a: Any, b: Any, *, a_is_sparse: bool, b_is_sparse: bool, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        if state.current() is None or a_is_sparse or b_is_sparse:
            return multiply(a, b, a_is_sparse=a_is_sparse, b_is_sparse=b_is_sparse, **kwargs)
        return tf.raw_ops.MatMul(a=a, b=b, **kwargs)

    return replaced


def widened(function: _Function) -> _Function:
    """Give a function float32 that cannot compute in half precision, or would cast its results back to it."""

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        if scope is not None:
            wide = functools.partial(_widened, cast=_cast_in(scope), dtype=tf.float32)
            args, kwargs = tuple(map(wide, args)), {name: wide(each) for name, each in kwargs.items()}
        # Out of the scope, so that products within the function are in float32, too.
        with state.changed(None):
            return function(*args, **kwargs)

    return replaced


def _widened(value: Any, cast: _Function, dtype: tf.DType) -> Any:  # noqa: ANN401 - any argument
    if not _is_half(value):
        return value
    return cast(value, dtype) if isinstance(value, tf.Tensor) else tf.cast(value, dtype)


def _is_half(value: Any) -> bool:  # noqa: ANN401 - any argument
    return _float_type(value) in HALF_TYPES


def _float_type(value: Any) -> tf.DType | None:  # noqa: ANN401 - any argument
    is_tensor = isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)
    return value.dtype if is_tensor and value.dtype in FLOATS else None


def without_check(check: _Function) -> _Function:
    """Let linear operators take tensors of other types than their own: the ops that they make bring types together."""

    @functools.wraps(check)
    def replaced(operator: Any, value: Any) -> None:  # noqa: ANN401 - as TensorFlow passes them
        if state.current() is None or not {value.dtype, operator.dtype} <= FLOATS:
            check(operator, value)

    return replaced


def around_array_writes(write: _Function) -> _Function:
    """Cast what a method of `TensorArray` writes to the type of the array."""

    @functools.wraps(write)
    def replaced(array: tf.TensorArray, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()

        if scope is not None and not scope.is_around_trace:
            args = tuple(cast_float(each, array.dtype) for each in args)
            kwargs = {name: cast_float(each, array.dtype) for name, each in kwargs.items()}
        return write(array, *args, **kwargs)

    return replaced
