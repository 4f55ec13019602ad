"""Lets branches and loops keep one type: what stands around `tf.cond` and `tf.while_loop` in a scope."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.mixed_precision.autocast import state
from tfmp.mixed_precision.autocast.op_types import FLOATS, cast_float, widest

_Function = Callable[..., Any]


class _TypesError(Exception):
    """The branches of a `tf.cond` return tensors of different types."""

    def __init__(self, types: list[tf.DType | None]) -> None:
        self.types = types


def around_branches(cond: _Function) -> _Function:
    """Let both branches of `cond`, which takes `true_fn` and `false_fn` as `tf.cond` does, return the wider type."""
    signature = inspect.signature(cond)

    @functools.wraps(cond)
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        true_fn, false_fn = (arguments.get(name) for name in ("true_fn", "false_fn"))
        is_in_graph = scope is not None and not scope.is_around_trace and not tf.executing_eagerly()
        if not (is_in_graph and callable(true_fn) and callable(false_fn)):
            return cond(*args, **kwargs)
        try:
            first, second = _of_one_type(true_fn, false_fn)
            return cond(**{**arguments, "true_fn": first, "false_fn": second})
        except _TypesError as error:
            branches = {"true_fn": _returning(true_fn, error.types), "false_fn": _returning(false_fn, error.types)}
        return cond(**{**arguments, **branches})

    return replaced


def _of_one_type(true_fn: _Function, false_fn: _Function) -> tuple[_Function, _Function]:
    """Return branches of which the second has the types of the first one, or tells that it has a wider one."""
    types: list[tf.DType | None] = []

    def first() -> Any:  # noqa: ANN401 - what the branch returns
        results = _with_tensors(true_fn())
        types[:] = _float_types(results)
        return results

    def second() -> Any:  # noqa: ANN401 - what the branch returns
        results = _with_tensors(false_fn())
        second_types = _float_types(results)
        if len(second_types) == len(types):
            wider = [_wider(*each) for each in zip(types, second_types, strict=True)]
            if wider != types:
                raise _TypesError(wider)
        return _cast_to(results, types)

    return first, second


def _float_types(results: Any) -> list[tf.DType | None]:  # noqa: ANN401 - what a branch returns
    flat = tf.nest.flatten(results, expand_composites=True)
    return [each.dtype if isinstance(each, tf.Tensor) and each.dtype in FLOATS else None for each in flat]


def _wider(one: tf.DType | None, other: tf.DType | None) -> tf.DType | None:
    return one if one is None or other is None else widest({one, other})


def _with_tensors(results: Any) -> Any:  # noqa: ANN401 - what a branch returns, or what a loop carries
    """Return tensors for what TensorFlow makes tensors of: numbers, arrays and variables."""

    def as_tensor(value: Any) -> Any:  # noqa: ANN401 - anything
        is_number = isinstance(value, float | np.ndarray | np.generic | tf.Variable)
        return tf.convert_to_tensor(value) if is_number else value

    return tf.nest.map_structure(as_tensor, results)


def _cast_to(results: Any, types: Sequence[tf.DType | None]) -> Any:  # noqa: ANN401 - what a branch returns
    flat = tf.nest.flatten(results, expand_composites=True)
    if len(flat) != len(types):
        return results
    cast_values = [cast_float(each, dtype) for each, dtype in zip(flat, types, strict=True)]
    return tf.nest.pack_sequence_as(results, cast_values, expand_composites=True)


def _returning(function: _Function, types: Sequence[tf.DType | None]) -> _Function:
    return lambda *args: _cast_to(_with_tensors(function(*args)), types)


def around_expressions(choose: _Function) -> _Function:
    """Let the values of AutoGraph's conditional expressions, `a if condition else b`, be of two types."""

    @functools.wraps(choose)
    def replaced(condition: Any, if_true: _Function, if_false: _Function, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        if state.current() is None:
            return choose(condition, if_true, if_false, *args, **kwargs)
        # The one of AutoGraph keeps the first value that a branch returned.
        return tf.cond(condition, if_true, if_false)

    return replaced


def around_comparisons(compare: _Function) -> _Function:
    """Skip AutoGraph's comparison of types: the branch or the loop that it makes brings them together.

    `compare` compares a variable of a branch or of a loop with what it was, or with that of the other branch.
    """

    @functools.wraps(compare)
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        types = {each.dtype for each in args if isinstance(each, tf.Tensor)}
        if scope is None or scope.is_around_trace or len(types) == 1 or not types <= FLOATS:
            compare(*args, **kwargs)

    return replaced


def around_loops(loop: _Function) -> _Function:
    """Let what a loop carries keep its types. `loop` takes `body` and `loop_vars`, as `tf.while_loop` does."""
    signature = inspect.signature(loop)

    @functools.wraps(loop)
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        if scope is None or scope.is_around_trace:
            return loop(*args, **kwargs)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        arguments["loop_vars"] = _with_tensors(arguments["loop_vars"])
        arguments["body"] = _returning(arguments["body"], _float_types(arguments["loop_vars"]))
        return loop(**arguments)

    return replaced
