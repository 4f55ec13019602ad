"""Branches and loops run in a scope: in eager code, in functions, and in graphs with control flow of both versions."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

_Code = Callable[[], Any]

_Pair = collections.namedtuple("_Pair", ["first", "second"])


def _eager(code: _Code) -> Any:
    return code()


def _function(code: _Code) -> Any:
    return tf.function(code, autograph=False)()


def _graph(code: _Code) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        results = code()
        session.run(tf.compat.v1.global_variables_initializer())
        values = session.run(results)
        for result, value in zip(tf.nest.flatten(results), tf.nest.flatten(values), strict=True):
            assert result.dtype.as_numpy_dtype == value.dtype
        return values


def _graph_v1(code: _Code) -> Any:
    tf.compat.v1.disable_control_flow_v2()
    try:
        return _graph(code)
    finally:
        tf.compat.v1.enable_control_flow_v2()


_TRACED = pytest.mark.parametrize("run", [_function, _graph, _graph_v1], ids=["function", "graph", "graph_v1"])
_EVERYWHERE = pytest.mark.parametrize(
    "run", [_eager, _function, _graph, _graph_v1], ids=["eager", "function", "graph", "graph_v1"]
)


def _names_and_values(results: Any) -> list[tuple[str, Any]]:
    found = [np.asarray(each) for each in tf.nest.flatten(results)]
    return [(each.dtype.name, each.tolist()) for each in found]


def _x() -> tf.Tensor:
    return tf.constant([[1.0, 2.0], [3.0, 4.0]])


def _true() -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(tf.constant(True), [])


@_TRACED
def test_branches_return_composite_tensors(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x = _x()
        return tf.cond(
            _true(), lambda: tf.RaggedTensor.from_tensor(x @ x), lambda: tf.RaggedTensor.from_tensor(x)
        ).to_tensor()

    assert _names_and_values(run(code)) == [("float32", _PRODUCT)]


_PRODUCT = [[7.0, 10.0], [15.0, 22.0]]


@_TRACED
@pytest.mark.parametrize("taken", [True, False])
def test_branches_return_the_wider_type(run: Callable[[_Code], Any], taken: bool) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x, pred = _x(), tf.logical_and(_true(), taken)
        return [
            tf.cond(pred, lambda: x @ x, lambda: x),
            tf.cond(pred, lambda: x, lambda: x @ x),
            tf.cond(pred, lambda: x @ x, lambda: (x @ x) + 1.0),
            tf.cond(pred, lambda: x @ x, lambda: tf.cast(x, tf.float64)),
            tf.cond(pred, lambda: tf.exp(x - x), lambda: tf.nn.relu(x @ x)),
        ]

    x = [[1.0, 2.0], [3.0, 4.0]]
    ones = [[1.0, 1.0], [1.0, 1.0]]
    more = [[8.0, 11.0], [16.0, 23.0]]
    assert _names_and_values(run(code)) == [
        ("float32", _PRODUCT if taken else x),
        ("float32", x if taken else _PRODUCT),
        ("float16", _PRODUCT if taken else more),
        ("float64", _PRODUCT if taken else x),
        ("float32", ones if taken else _PRODUCT),
    ]


@_EVERYWHERE
def test_branches_return_nests(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x, pred = _x(), _true()
        half, wide = (lambda: x @ x), (lambda: x + 0.0)
        first = tf.cond(
            pred,
            lambda: {"a": wide(), "b": (half(), tf.constant(1)), "c": [half()]},
            lambda: {"a": half(), "b": (half(), tf.constant(2)), "c": [wide()]},
        )
        second = tf.cond(pred, lambda: _Pair(half(), wide()), lambda: _Pair(wide(), wide()))
        assert isinstance(second, _Pair)
        assert sorted(first) == ["a", "b", "c"]
        return [first["a"], *first["b"], first["c"][0], *second]

    wide = "float16" if run is _eager else "float32"
    assert [name for name, _ in _names_and_values(run(code))] == ["float32", "float16", "int32", wide, wide, "float32"]


@pytest.mark.parametrize("run", [_eager, _function], ids=["eager", "function"])
def test_branches_return_nothing_beside_tensors(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x = _x()
        found = tf.cond(tf.reduce_sum(x) > 0, lambda: (x @ x, None), lambda: (x + 0.0, None))
        assert found[1] is None
        assert tf.cond(tf.reduce_sum(x) > 0, lambda: None, lambda: None) is None
        return found[0]

    assert _names_and_values(run(code))[0][1] == _PRODUCT


@_TRACED
@pytest.mark.parametrize("other", ["number", "array", "variable", "numpy number"])
def test_branch_returns_what_is_no_tensor_beside_a_half_tensor(run: Callable[[_Code], Any], other: str) -> None:
    def found(scope: Any) -> list[tuple[str, Any]]:
        def code() -> Any:
            x, pred = _x(), _true()
            others: dict[str, Any] = {
                "number": 0.5,
                "array": np.full([2, 2], 0.5, np.float32),
                "variable": tf.compat.v1.get_variable("v", initializer=0.5, use_resource=True)
                if run is not _function
                else _VARIABLE,
                "numpy number": np.float32(0.5),
            }
            with scope:
                return [
                    tf.cond(pred, lambda: x @ x, lambda: others[other]),
                    tf.cond(pred, lambda: others[other], lambda: x @ x),
                ]

        return _names_and_values(run(code))

    plain = found(tfmp.autocast(enabled=False))
    for (name, value), (_, expected) in zip(found(tfmp.autocast()), plain, strict=True):
        assert name in ("float16", "float32")
        assert value == expected


_VARIABLE = tf.Variable(0.5)


@_TRACED
def test_branches_of_types_that_are_no_floats_are_refused_as_ever(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x = _x()
        return tf.cond(_true(), lambda: x @ x, lambda: tf.constant([[1]]))

    with pytest.raises((TypeError, ValueError), match=r"true_fn.* and .*false_fn"):
        run(code)


@_TRACED
def test_error_in_a_branch_is_that_of_the_branch(run: Callable[[_Code], Any]) -> None:
    def fails() -> Any:
        raise ZeroDivisionError("of the branch")

    @tfmp.autocast()
    def code() -> Any:
        x = _x()
        with pytest.raises(ZeroDivisionError, match="of the branch"):
            tf.cond(_true(), lambda: x @ x, fails)
        with pytest.raises(ZeroDivisionError, match="of the branch"):
            tf.cond(_true(), fails, lambda: x @ x)
        return tf.cond(_true(), lambda: x @ x, lambda: x)

    assert _names_and_values(run(code)) == [("float32", _PRODUCT)]


@_TRACED
def test_gradients_flow_through_branches(run: Callable[[_Code], Any]) -> None:
    def code() -> Any:
        w = _weight(run)
        x = _x()
        pred = _true()
        with tf.GradientTape() as tape, tfmp.autocast():
            tape.watch(x)
            y = tf.cond(pred, lambda: tf.nn.relu(x @ w), lambda: x * 2.0)
            z = tf.cond(tf.logical_not(pred), lambda: y @ w, lambda: tf.exp(y * 0.0))
            loss = tf.reduce_sum(y) + tf.reduce_sum(z)
        if run is _function:
            return tape.gradient(loss, [x, w])
        return tf.gradients(loss, [x, w])

    assert _names_and_values(run(code)) == [
        ("float32", [[2.0, 2.0], [2.0, 2.0]]),
        ("float32", [[4.0, 4.0], [6.0, 6.0]]),
    ]


_W = tf.Variable([[1.0, 1.0], [1.0, 1.0]])


def _weight(run: Callable[[_Code], Any]) -> Any:
    if run in (_eager, _function):
        return _W
    return tf.compat.v1.get_variable("w", initializer=np.ones([2, 2], np.float32), use_resource=True)


@pytest.mark.parametrize("run", [_graph, _graph_v1], ids=["graph", "graph_v1"])
def test_branch_makes_its_variables(run: Callable[[_Code], Any]) -> None:
    def dense(x: tf.Tensor) -> tf.Tensor:
        return x @ tf.compat.v1.get_variable("inner", [2, 2], initializer=tf.compat.v1.ones_initializer())

    def plain() -> Any:
        x = _x()
        return tf.cond(_true(), lambda: x @ x, lambda: dense(x))

    assert _names_and_values(run(tfmp.autocast()(plain))) == [("float16", run(plain).tolist())]


@_TRACED
def test_branches_are_nested(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x, pred = _x(), _true()

        def inner() -> Any:
            return tf.cond(pred, lambda: x @ x, lambda: tf.cond(pred, lambda: x, lambda: x @ x))

        return [
            tf.cond(pred, inner, lambda: x @ x),
            tf.cond(pred, lambda: x @ x, inner),
            tf.cond(pred, lambda: tf.nn.relu(inner()) @ x, lambda: x @ x),
        ]

    found = _names_and_values(run(code))
    assert [name for name, _ in found] == ["float32", "float32", "float16"]
    assert found[0][1] == found[1][1] == _PRODUCT


@_EVERYWHERE
def test_case_and_switch_case_return_the_wider_type(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x, pred = _x(), _true()
        index = tf.cast(pred, tf.int32)
        return [
            tf.case([(tf.logical_not(pred), lambda: x), (pred, lambda: x @ x)], default=lambda: x - 1.0),
            tf.switch_case(index, [lambda: x @ x, lambda: tf.nn.relu(x @ x)]),
        ]

    assert [value for _, value in _names_and_values(run(code))] == [_PRODUCT, _PRODUCT]


@_EVERYWHERE
def test_loop_keeps_the_types_in_which_it_began(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x = _x()
        w = tf.eye(2)

        def body(i: Any, wide: Any, half: Any, pair: Any) -> Any:
            assert (wide.dtype, half.dtype, pair.first.dtype) == (tf.float32, tf.float16, tf.float32)
            return i + 1, wide @ w, tf.exp(half * 0.0), _Pair(pair.first @ w, {"n": pair.second["n"] + 1})

        i, wide, half, pair = tf.while_loop(
            lambda i, *_: i < 3, body, [tf.constant(0), x, x @ x, _Pair(x, {"n": tf.constant(5)})]
        )
        assert isinstance(pair, _Pair)
        return [i, wide, half, pair.first, pair.second["n"]]

    x = [[1.0, 2.0], [3.0, 4.0]]
    assert _names_and_values(run(code)) == [
        ("int32", 3),
        ("float32", x),
        ("float16", [[1.0, 1.0], [1.0, 1.0]]),
        ("float32", x),
        ("int32", 8),
    ]


_V1 = {
    "compat.v1": lambda: tf.compat.v1,
    "compat.v2.compat.v1": lambda: tf.compat.v2.compat.v1,
    "compat.v1.compat.v1": lambda: tf.compat.v1.compat.v1,
}


@_TRACED
@pytest.mark.parametrize("name", _V1)
def test_branches_and_loops_of_tensorflow_1_by_all_of_their_names(run: Callable[[_Code], Any], name: str) -> None:
    # Keras 2 takes them from compat.v2.compat.v1.
    v1 = _V1[name]()

    @tfmp.autocast()
    def code() -> Any:
        x = _x()
        return [
            v1.cond(_true(), lambda: x @ x, lambda: x),
            v1.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ tf.eye(2)), [0, x])[1],
            v1.nn.moments(x @ x, [0, 1])[0],
        ]

    found = _names_and_values(run(code))
    assert found == [("float32", _PRODUCT), ("float32", [[1.0, 2.0], [3.0, 4.0]]), ("float32", 13.5)]


@_EVERYWHERE
def test_loop_carries_one_tensor(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        w = tf.eye(2) * 2.0
        # In eager code TensorFlow takes no tensor without a list around it.
        first = tf.while_loop(lambda x: tf.reduce_max(x) < 30.0, lambda x: [x @ w] if run is _eager else x @ w, [_x()])
        second = tf.while_loop(lambda x: True, lambda x: (x @ w,), (_x(),), maximum_iterations=2)
        third = tf.while_loop(
            lambda x: True, lambda x: [x @ w], [_x()], [tf.TensorShape([None, 2])], maximum_iterations=1
        )
        return tf.nest.flatten([first, second, third])

    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert _names_and_values(run(code)) == [("float32", (x * factor).tolist()) for factor in (8, 4, 2)]


@_EVERYWHERE
@pytest.mark.parametrize("initial", ["number", "array", "numpy number", "variable"])
def test_loop_begins_with_what_is_no_tensor(run: Callable[[_Code], Any], initial: str) -> None:
    def code() -> Any:
        variable = (
            _VARIABLE
            if run in (_eager, _function)
            else tf.compat.v1.get_variable("v", initializer=0.5, use_resource=True)
        )
        begins: dict[str, Any] = {
            "number": 0.5,
            "array": np.float32([[0.5]]),
            "numpy number": np.float32(0.5),
            "variable": variable,
        }
        one = tf.constant([[1.0]])
        half = lambda: tf.reshape(one @ one, np.shape(begins[initial]) if initial != "variable" else [])  # noqa: E731
        with tfmp.autocast():
            return tf.while_loop(lambda i, total: i < 3, lambda i, total: (i + 1, half()), [0, begins[initial]])[1]

    name, value = _names_and_values(run(code))[0]
    assert (name, np.ravel(value).tolist()) == ("float32", [1.0])


@_EVERYWHERE
def test_weight_that_was_read_outside_of_a_loop_does_not_widen_what_is_within(run: Callable[[_Code], Any]) -> None:
    def code() -> Any:
        w = _weight(run)
        x = _x()
        with tfmp.autocast():
            bias = tf.convert_to_tensor(w)
            y = x @ x
            return [
                y + bias,
                tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, (y + w)), [0, y])[1],
                tf.cond(_true(), lambda: y + w, lambda: y),
                tf.cond(_true(), lambda: y + bias, lambda: y),
            ]

    more = [[8.0, 11.0], [16.0, 23.0]]
    assert _names_and_values(run(code)) == [("float16", more)] * 4


@_EVERYWHERE
def test_loops_and_branches_are_nested(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        eye = tf.eye(2)

        def inner(j: Any, y: Any) -> Any:
            return j + 1, tf.cond(j > 0, lambda: y @ eye, lambda: y + 1.0)

        def outer(i: Any, y: Any) -> Any:
            return i + 1, tf.while_loop(lambda j, y: j < 2, inner, [0, y])[1] @ eye

        return tf.cond(_true(), lambda: tf.while_loop(lambda i, y: i < 2, outer, [0, _x()])[1], lambda: _x() @ eye)

    assert _names_and_values(run(code)) == [("float32", [[3.0, 4.0], [5.0, 6.0]])]


@_EVERYWHERE
def test_gradients_flow_through_loops(run: Callable[[_Code], Any]) -> None:
    def code() -> Any:
        w, x = _weight(run), _x()
        with tf.GradientTape() as tape, tfmp.autocast():
            tape.watch(x)
            y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.nn.relu(y @ w) * 0.5), [0, x])[1]
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, [x, w]) if run in (_eager, _function) else tf.gradients(loss, [x, w])

    assert _names_and_values(run(code)) == [
        ("float32", [[1.0, 1.0], [1.0, 1.0]]),
        ("float32", [[4.5, 4.5], [5.5, 5.5]]),
    ]


@_EVERYWHERE
def test_map_fn_runs(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x = tf.stack([_x(), _x()])
        return [
            tf.map_fn(lambda x: x @ x, x),
            tf.map_fn(lambda x: x @ x, x, fn_output_signature=tf.float32),
            tf.map_fn(lambda x: tf.reduce_sum(x @ x), x),
            tf.map_fn(lambda pair: (pair[0] @ pair[1], pair[0]), (x, x))[0],
        ]

    found = _names_and_values(run(code))
    assert found[1] == ("float32", [_PRODUCT] * 2)
    assert [value for _, value in found] == [[_PRODUCT] * 2, [_PRODUCT] * 2, [54.0] * 2, [_PRODUCT] * 2]


@_EVERYWHERE
def test_map_fn_returns_a_type_that_is_named(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        return tf.map_fn(lambda x: x @ x, tf.stack([_x(), _x()]), fn_output_signature=tf.float16)

    assert _names_and_values(run(code)) == [("float16", [_PRODUCT] * 2)]


@_EVERYWHERE
def test_scan_and_folds_run(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x = tf.stack([_x(), _x()])
        return [
            tf.scan(lambda state, x: x @ x, x, initializer=tf.zeros([2, 2])),
            tf.scan(lambda state, x: state @ x, x),
            tf.foldl(lambda state, x: state @ x, x),
            tf.foldr(lambda state, x: state @ x, x, initializer=tf.eye(2)),
        ]

    found = [value for _, value in _names_and_values(run(code))]
    assert found == [[_PRODUCT] * 2, [[[1.0, 2.0], [3.0, 4.0]], _PRODUCT], _PRODUCT, _PRODUCT]


@_EVERYWHERE
def test_loop_writes_half_tensors_into_an_array(run: Callable[[_Code], Any]) -> None:
    @tfmp.autocast()
    def code() -> Any:
        x = _x()

        def body(i: Any, array: Any) -> Any:
            return i + 1, array.write(i, x @ x)

        begin = tf.TensorArray(tf.float32, 2)
        return tf.while_loop(lambda i, array: i < 2, body, [tf.constant(0), begin])[1].stack()

    assert _names_and_values(run(code)) == [("float32", [_PRODUCT] * 2)]


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(tfmp.autocast()(function))


@pytest.mark.parametrize("taken", [True, False])
def test_autograph_if_with_branches_of_different_types(taken: bool) -> None:
    @_converted
    def forward(x: tf.Tensor, pred: tf.Tensor) -> tf.Tensor:
        if pred:
            x = x * 1.0
            y = x @ x
        else:
            y = x
        return y

    found = forward(_x(), tf.constant(taken))
    assert _names_and_values(found) == [("float32", _PRODUCT if taken else [[1.0, 2.0], [3.0, 4.0]])]


def test_autograph_if_that_changes_a_type() -> None:
    @_converted
    def forward(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            x = x @ x
        return x

    assert _names_and_values(forward(_x())) == [("float32", _PRODUCT)]


def test_autograph_if_that_returns() -> None:
    @_converted
    def forward(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            return x @ x
        return x

    assert _names_and_values(forward(_x())) == [("float32", _PRODUCT)]


def test_autograph_conditional_expression() -> None:
    @_converted
    def forward(x: tf.Tensor) -> tf.Tensor:
        return x @ x if tf.reduce_sum(x) > 0 else x

    assert _names_and_values(forward(_x())) == [("float32", _PRODUCT)]


def test_autograph_if_with_branches_of_one_type() -> None:
    @_converted
    def forward(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            x = x * 1.0
            y = x @ x
        else:
            y = tf.nn.relu(x @ x)
        return y

    assert _names_and_values(forward(_x())) == [("float16", _PRODUCT)]


def test_autograph_for_that_changes_a_type() -> None:
    @_converted
    def forward(x: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(count):
            x = x @ tf.eye(2)
        return x

    assert _names_and_values(forward(_x(), tf.constant(2))) == [("float32", [[1.0, 2.0], [3.0, 4.0]])]


def test_autograph_while_that_changes_a_type() -> None:
    @_converted
    def forward(x: tf.Tensor) -> tf.Tensor:
        while tf.reduce_sum(x) < 100:
            x = x @ (tf.eye(2) * 2.0)
        return x

    assert _names_and_values(forward(_x())) == [("float32", [[16.0, 32.0], [48.0, 64.0]])]


def test_autograph_loop_with_break_and_total() -> None:
    @_converted
    def forward(rows: tf.Tensor, w: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        total, last = 0.0, tf.zeros([2])
        for row in rows:
            last = tf.linalg.matvec(w, row)
            if tf.reduce_sum(last) > 100:
                break
            total += tf.reduce_sum(last)
        return total, last

    found = forward(_x(), tf.eye(2))
    assert _names_and_values(found) == [("float32", 10.0), ("float32", [3.0, 4.0])]


def test_autograph_loop_fills_an_array_with_half_tensors() -> None:
    @_converted
    def forward(rows: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        array = tf.TensorArray(tf.float32, 2)
        for i in tf.range(2):
            array = array.write(i, tf.linalg.matvec(w, rows[i]))
        return array.stack()

    assert _names_and_values(forward(_x(), tf.eye(2))) == [("float32", [[1.0, 2.0], [3.0, 4.0]])]


def test_autograph_recurrent_cell_trains() -> None:
    w, u = tf.Variable(tf.eye(2)), tf.Variable(tf.eye(2))

    @_converted
    def forward(rows: tf.Tensor) -> tf.Tensor:
        state = tf.zeros([1, 2])
        for row in rows:
            state = tf.nn.relu(row[tf.newaxis] @ w + state @ u)
        return tf.reduce_sum(state)

    with tf.GradientTape() as tape:
        loss = forward(_x())
    grads = tape.gradient(loss, [w, u])
    assert _names_and_values([loss, *grads]) == [
        ("float32", 10.0),
        ("float32", [[4.0, 4.0], [6.0, 6.0]]),
        ("float32", [[1.0, 1.0], [2.0, 2.0]]),
    ]


def test_error_of_autograph_in_a_scope_is_still_clear() -> None:
    @_converted
    def forward(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            x = x * 1.0
            y = x @ x
        else:
            y = tf.constant(1)
        return y

    with pytest.raises(TypeError, match=r"'y' has dtype"):
        forward(_x())


def test_xla_compiles_branches_and_loops() -> None:
    w = tf.Variable(tf.eye(2))

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast():
            y = tf.cond(tf.reduce_sum(x) > 0, lambda: x @ w, lambda: x)
            y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ w), [0, y], maximum_iterations=2)[1]
            loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, w)

    y, grad = step(_x())
    assert _names_and_values([y])[0] == ("float32", [[1.0, 2.0], [3.0, 4.0]])
    assert (grad.dtype, float(tf.reduce_sum(grad))) == (tf.float32, 3 * 20.0)
