"""Branches and loops run in a scope: in eager code, in functions, and in graphs with control flow of both versions."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Program, Row, assert_as_plain, assert_row, each_row, eager, matrix, run, within

import tfmp

#: Takes a matrix, a condition that is true and a variable, and returns what it computes.
_Code = Callable[[Any, Any, Any], Any]

_Pair = collections.namedtuple("_Pair", ["first", "second"])


def _in_scope(code: _Code) -> Program:
    return within(lambda x, w: code(x, tf.compat.v1.placeholder_with_default(tf.constant(True), []), w))


_TRACED = "function graph graph_v1"
_traced = pytest.mark.parametrize("way", _TRACED.split())


def _branches(x: Any, true: Any, _: Any) -> Any:
    ragged = tf.RaggedTensor.from_tensor
    return [
        tf.cond(true, lambda: x @ x, lambda: x),
        tf.cond(true, lambda: x, lambda: x @ x),
        tf.cond(true, lambda: x @ x, lambda: (x @ x) + 1.0),
        tf.cond(true, lambda: tf.exp(x - x), lambda: tf.nn.relu(x @ x)),
        tf.cond(true, lambda: tf.nn.relu(tf.cond(true, lambda: x, lambda: x @ x)) @ x, lambda: x @ x),
        tf.cond(true, lambda: ragged(x @ x), lambda: ragged(x)).to_tensor(),
        tf.case([(tf.logical_not(true), lambda: x), (true, lambda: x @ x)], default=lambda: x - 1.0),
        tf.switch_case(tf.cast(true, tf.int32), [lambda: x @ x, lambda: tf.nn.relu(x @ x)]),
    ]


def _nests(x: Any, true: Any, _: Any) -> Any:
    half, wide = (lambda: x @ x), (lambda: x + 0.0)
    first = tf.cond(
        true,
        lambda: {"a": wide(), "b": (half(), tf.constant(1)), "c": [half()]},
        lambda: {"a": half(), "b": (half(), tf.constant(2)), "c": [wide()]},
    )
    second = tf.cond(true, lambda: _Pair(half(), wide()), lambda: _Pair(wide(), wide()))
    assert isinstance(second, _Pair)
    assert sorted(first) == ["a", "b", "c"]
    return [first["a"], *first["b"], first["c"][0], *second]


def _nothing(x: Any, true: Any, _: Any) -> Any:
    found = tf.cond(true, lambda: (x @ x, None), lambda: (x + 0.0, None))
    assert found[1] is None
    assert tf.cond(true, lambda: None, lambda: None) is None
    return found[0]


#: What is no tensor, and TensorFlow makes a tensor of.
_OTHERS: dict[str, Callable[[Any], Any]] = {
    "number": lambda w: 0.5,
    "array": lambda w: np.full([2, 2], 0.5, np.float32),
    "number of NumPy": lambda w: np.float32(0.5),
    "variable": lambda w: w,
}


def _beside(other: Callable[[Any], Any]) -> _Code:
    return lambda x, true, w: [
        tf.cond(true, lambda: x @ x, lambda: other(w)),
        tf.cond(true, lambda: other(w), lambda: x @ x),
    ]


def _beginning_with(other: Callable[[Any], Any]) -> _Code:
    def code(x: Any, _: Any, w: Any) -> Any:
        half = lambda: tf.fill(getattr(other(w), "shape", ()), (x @ x)[0, 0])  # noqa: E731
        return tf.while_loop(lambda i, total: i < 3, lambda i, total: (i + 1, half()), [0, other(w)])[1]

    return code


def _loop_of_types(x: Any, _: Any, __: Any) -> Any:
    eye = tf.eye(2)

    def body(i: Any, wide: Any, half: Any, pair: Any) -> Any:
        return i + 1, wide @ eye, tf.exp(half * 0.0), _Pair(pair.first @ eye, {"n": pair.second["n"] + 1})

    begin = [tf.constant(0), x, x @ x, _Pair(x, {"n": tf.constant(5)})]
    i, wide, half, pair = tf.while_loop(lambda i, *_: i < 3, body, begin)
    assert isinstance(pair, _Pair)
    return [i, wide, half, pair.first, pair.second["n"]]


def _loops_of_one_tensor(x: Any, _: Any, __: Any) -> Any:
    w = tf.eye(2) * 2.0
    # In eager code TensorFlow takes no tensor without a list around it.
    body = (lambda x: [x @ w]) if tf.executing_eagerly() else (lambda x: x @ w)
    first = tf.while_loop(lambda x: tf.reduce_max(x) < 30.0, body, [x])
    second = tf.while_loop(lambda x: True, lambda x: (x @ w,), (x,), maximum_iterations=2)
    third = tf.while_loop(lambda x: True, lambda x: [x @ w], [x], [tf.TensorShape([None, 2])], maximum_iterations=1)
    return tf.nest.flatten([first, second, third])


def _by_names_of_tensorflow_1(v1: Any) -> _Code:
    return lambda x, true, _: [
        v1.cond(true, lambda: x @ x, lambda: x),
        v1.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ tf.eye(2)), [0, x])[1],
        v1.nn.moments(x @ x, [0, 1])[0],
    ]


def _weight_read_outside(x: Any, true: Any, w: Any) -> Any:
    bias, y = tf.convert_to_tensor(w), x @ x
    return [
        y + bias,
        tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, (y + w)), [0, y])[1],
        tf.cond(true, lambda: y + w, lambda: y),
        tf.cond(true, lambda: y + bias, lambda: y),
    ]


def _nested(x: Any, true: Any, _: Any) -> Any:
    eye = tf.eye(2)

    def inner(j: Any, y: Any) -> Any:
        return j + 1, tf.cond(j > 0, lambda: y @ eye, lambda: y + 1.0)

    def outer(i: Any, y: Any) -> Any:
        return i + 1, tf.while_loop(lambda j, y: j < 2, inner, [0, y])[1] @ eye

    return tf.cond(true, lambda: tf.while_loop(lambda i, y: i < 2, outer, [0, x])[1], lambda: x @ eye)


def _mapped_and_scanned(x: Any, _: Any, __: Any) -> Any:
    both = tf.stack([x, x])
    body = lambda i, array: (i + 1, array.write(i, x @ x))  # noqa: E731
    return [
        tf.map_fn(lambda x: x @ x, both),
        tf.map_fn(lambda x: tf.reduce_sum(x @ x), both, fn_output_signature=tf.float32),
        tf.map_fn(lambda pair: (pair[0] @ pair[1], pair[0]), (both, both))[0],
        tf.scan(lambda state, x: x @ x, both, initializer=tf.zeros([2, 2])),
        tf.foldl(lambda state, x: state @ x, both),
        tf.foldr(lambda state, x: state @ x, both, initializer=tf.eye(2)),
        tf.while_loop(lambda i, array: i < 2, body, [tf.constant(0), tf.TensorArray(tf.float32, 2)])[1].stack(),
    ]


def _of_types_that_are_named(x: Any, true: Any, _: Any, cast: bool = False) -> Any:
    # Plain code must cast what the other branch or the signature is not.
    wide, half = ((lambda x, to=to: tf.cast(x @ x, to) if cast else x @ x) for to in (tf.float64, tf.float16))
    return [
        tf.cond(true, lambda: wide(x), lambda: tf.cast(x, tf.float64)),
        tf.map_fn(half, tf.stack([x, x]), fn_output_signature=tf.float16),
    ]


def _row(
    code: _Code, types: str, in_eager_code: str | None = None, ways: str = _TRACED, plain: _Code | None = None
) -> Row:
    """Return a row of code and the types of its results; those in eager code, if it runs there."""
    ways = f"eager {ways}" if in_eager_code else ways
    return Row(_in_scope(code), types, ways, in_eager_code, _in_scope(plain) if plain else None)


_V1 = {"v1": tf.compat.v1, "v2.v1": tf.compat.v2.compat.v1, "v1.v1": tf.compat.v1.compat.v1}
_ROWS: dict[str, Row] = {
    "branches": _row(_branches, "F F H F H F F H", "H F H F H F H H"),
    "branches that are not taken": _row(lambda x, true, w: _branches(x, tf.logical_not(true), w), "F F H F H F F H"),
    "types that are named": _row(
        _of_types_that_are_named, "float64 H", "H H", plain=functools.partial(_of_types_that_are_named, cast=True)
    ),
    "nests": _row(_nests, "F H int32 F F F", "F H int32 H H F"),
    "nothing": _row(_nothing, "F", "H", "function"),
    **{f"beside a {name}": _row(_beside(other), "F F") for name, other in _OTHERS.items()},
    "variable in a branch": _row(
        lambda x, true, _: tf.cond(true, lambda: x @ x, lambda: x @ tf.compat.v1.get_variable("inner", [2, 2])),
        "H",
        ways="graph graph_v1",
    ),
    "loop of types": _row(_loop_of_types, "int32 F H F int32", "int32 F H F int32"),
    "loops of one tensor": _row(_loops_of_one_tensor, "F F F", "F F F"),
    **{f"loop from a {name}": _row(_beginning_with(other), "F", "F") for name, other in _OTHERS.items()},
    # Keras 2 takes them from compat.v2.compat.v1.
    **{f"names of compat.{name}": _row(_by_names_of_tensorflow_1(v1), "F F F") for name, v1 in _V1.items()},
    "weight read outside": _row(_weight_read_outside, "H H H H", "H H H H"),
    "loops and branches": _row(_nested, "F", "F"),
    "mapped and scanned": _row(_mapped_and_scanned, "F F F F F F F", "F F F F F F F"),
}


@each_row(_ROWS)
def test_code_runs_in_a_scope_as_in_none(row: Row, way: str) -> None:
    assert_row(row, way)


@_traced
def test_branches_of_types_that_are_no_floats_are_refused_as_ever(way: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"true_fn.* and .*false_fn"):
        run(
            way, _in_scope(lambda x, true, _: tf.cond(true, lambda: x @ x, lambda: tf.constant([[1]]))), tfmp.autocast()
        )


@_traced
def test_error_in_a_branch_is_that_of_the_branch(way: str) -> None:
    def fails() -> Any:
        raise ZeroDivisionError("of the branch")

    def code(x: Any, true: Any, _: Any) -> Any:
        for branches in ((lambda: x @ x, fails), (fails, lambda: x @ x)):
            with pytest.raises(ZeroDivisionError, match="of the branch"):
                tf.cond(true, *branches)
        return x @ x

    assert_row(_row(code, "H"), way)


def _if_else(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if tf.reduce_sum(x) > 0:
        x = x * 1.0
        y = x @ x
    else:
        y = x
    return y, x @ x if tf.reduce_sum(x) > 0 else x


def _if_that_returns(x: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(x) > 0:
        return x @ x
    return x


def _loops(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    y = x
    for _ in tf.range(tf.cast(tf.abs(x[0, 1]), tf.int32)):
        y = y @ tf.eye(2)
    while tf.abs(tf.reduce_sum(x)) < 100:
        x = x @ (tf.eye(2) * 2.0)
    return x, y


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("function", [_if_else, _if_that_returns, _loops])
def test_code_that_autograph_converts_runs_and_has_gradients(function: Callable[..., Any], sign: float) -> None:
    def found(scope: Any) -> list[Any]:
        x = sign * matrix()
        converted = tf.function(scope(function))
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = tf.nest.flatten(converted(x))
        return [*results, tape.gradient(results, x)]

    expected = found(eager)
    assert_as_plain(found(tfmp.autocast()), expected, ["float32"] * len(expected))


def test_error_of_autograph_in_a_scope_is_still_clear() -> None:
    @tf.function
    @tfmp.autocast()
    def forward(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            x = x * 1.0
            y = x @ x
        else:
            y = tf.constant(1)
        return y

    with pytest.raises(TypeError, match=r"'y' has dtype"):
        forward(matrix())
