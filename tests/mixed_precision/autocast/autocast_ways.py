"""Ways and cases of code that runs in a scope, and what tests compare: its results with those of plain code."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfmp

#: Takes a function and returns one that is called in its place, such as `tf.function`.
Way = Callable[[Callable[..., Any]], Callable[..., Any]]

#: In the place of a scope, for plain code.
PLAIN = contextlib.nullcontext()


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself."""
    return function


each_way = pytest.mark.parametrize("way", [eager, tf.function], ids=["eager", "function"])


def matrix() -> tf.Tensor:
    """Return what most tests compute with."""
    return tf.constant([[1.0, 2.0], [3.0, 4.0]])


def types(results: Any) -> list[str]:
    """Return the names of the types of tensors, variables of any Keras and arrays."""
    return [tf.as_dtype(each.dtype).name for each in tf.nest.flatten(results)]


def assert_as_plain(found: Any, plain: Any, expected: list[str], tolerance: float = 0.0) -> None:
    """Assert that results in a scope have the types that are expected, and the values of plain code."""
    assert types(found) == expected
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(plain), strict=True):
        np.testing.assert_allclose(_numbers(one), _numbers(other), rtol=tolerance, atol=tolerance)


def _numbers(result: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(result) if tf.is_tensor(result) else result).astype(np.float64)


#: Takes a scope, a variable and a matrix, and returns what it computes of them.
Program = Callable[[Any, Any, tf.Tensor], Any]

W = [[1.0, 0.5], [2.0, 1.0]]


def run(way: str, program: Program, scope: Any) -> Any:
    """Run a program in eager code, in a function or a program of XLA, or in a graph, also with control flow v1."""
    if not way.startswith("graph"):
        settings = {"autograph": False, "jit_compile": way == "xla"}
        called: Way = eager if way == "eager" else functools.partial(tf.function, **settings)
        return called(functools.partial(program, scope, tf.Variable(W)))(matrix())
    control_flow = _control_flow_v1() if way == "graph_v1" else PLAIN
    with control_flow, tf.Graph().as_default(), tf.compat.v1.Session() as session:
        w = tf.compat.v1.get_variable("w", initializer=np.float32(W), use_resource=True)
        results = program(scope, w, matrix())
        session.run(tf.compat.v1.global_variables_initializer())
        found = session.run(results)
        for result, value in zip(tf.nest.flatten(results), tf.nest.flatten(found), strict=True):
            assert result.dtype.as_numpy_dtype == value.dtype
        return found


@contextlib.contextmanager
def _control_flow_v1() -> Iterator[None]:
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        tf.compat.v1.enable_control_flow_v2()


def within(code: Callable[[tf.Tensor, Any], Any]) -> Program:
    """Return a program that calls code with the matrix and the variable in the scope."""

    def program(scope: Any, w: Any, x: tf.Tensor) -> Any:
        with scope:
            return code(x, w)

    return program


class Row(NamedTuple):
    """A program that computes in a scope what it does in none.

    Attributes:
        program: The program.
        types: The types of its results, with H for the type of the scope, and F for float32.
        ways: How it runs.
        in_eager_code: The types of its results in eager code, where they are others.
        plain: The program that computes the same in no scope, where it is another.
    """

    program: Program
    types: str
    ways: str = "eager function graph"
    in_eager_code: str | None = None
    plain: Program | None = None


def each_row(rows: dict[str, Row]) -> pytest.MarkDecorator:
    """Run a test with each row in each way."""
    found = [pytest.param(row, way, id=f"{name}-{way}") for name, row in rows.items() for way in row.ways.split()]
    return pytest.mark.parametrize(("row", "way"), found)


def assert_row(row: Row, way: str, dtype: str = "float16") -> None:
    """Assert that a program has the types of its row in a scope, and the values of plain code."""
    expected = (row.in_eager_code or row.types) if way == "eager" else row.types
    names = [{"H": dtype, "F": "float32"}.get(each, each) for each in expected.split()]
    found, plain = run(way, row.program, tfmp.autocast(dtype)), run(way, row.plain or row.program, PLAIN)
    assert_as_plain(found, plain, names)


_TOLERANCES = {"float16": 4e-3, "bfloat16": 4e-2}


class Case(NamedTuple):
    """What is computed of which inputs.

    Attributes:
        compute: Takes the inputs.
        inputs: Each is a letter of `INPUTS` before a shape, whose sizes are digits.
        results: The types of the results, with H for the type of autocast, and F for float32.
        in_bfloat16: The types of the results where they are others in bfloat16.
    """

    compute: Callable[..., Any]
    inputs: str
    results: str
    in_bfloat16: str | None = None


#: An activation; one that is the result of a product in the scope; large logits, which are, too; labels; activations of
#: other types; and a weight, one that does not train, and one in half precision.
INPUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "x": tf.constant,
    "h": tf.constant,
    "l": lambda array: tf.constant(8 * array),
    "o": lambda array: tf.one_hot(tf.argmax(array, 1), array.shape[1]),
    "d": functools.partial(tf.constant, dtype=tf.float64),
    "b": functools.partial(tf.constant, dtype=tf.bfloat16),
    "w": tf.Variable,
    "u": functools.partial(tf.Variable, trainable=False),
    "v": functools.partial(tf.Variable, dtype=tf.float16),
}


def values_of(case: Case, plain: bool = False) -> list[Any]:
    """Return inputs that half precision does not round; for plain code, all are in float32."""
    random = np.random.default_rng(3)
    found = []
    for kind, *shape in case.inputs.split():
        size = [*map(int, shape)]
        array = np.float32(random.integers(1, 8, size) * random.choice([-1, 1], size) / 8)
        found.append(INPUTS[{"d": "x", "b": "x", "v": "w"}.get(kind, kind) if plain else kind](array))
    return found


def compute_case(case: Case, scope: Any, values: list[Any], *activations: tf.Tensor) -> tuple[list[Any], list[Any]]:
    """Compute a case of the activations, and of the weights among the values; return results and gradients."""
    left = iter(activations)
    sources = [value if isinstance(value, tf.Variable) else next(left) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(activations)
        with scope:
            given = [
                x @ np.eye(x.shape[-1], dtype=np.float32) if kind in "hl" else tf.stop_gradient(x) if kind == "o" else x
                for x, (kind, *_) in zip(sources, case.inputs.split(), strict=True)
            ]
            results = list(tf.nest.flatten(case.compute(*given)))[: len(case.results.split())]
        floats = [tf.cast(each, tf.float64) for each in results if each.dtype.is_floating]
        # Weighted, since the sum of a softmax has no gradient.
        losses = [tf.tensordot(tf.reshape(each, [-1]), np.cos(np.arange(np.prod(each.shape))), 1) for each in floats]
    return results, tape.gradient(losses, sources) if losses else []


def assert_case(case: Case, dtype: str, results: list[Any], grads: list[Any], times: float = 1) -> None:
    """Compare with plain code; the error that is allowed is that of the type, so many times."""
    error = _TOLERANCES[dtype] * times
    expected = case.in_bfloat16 if dtype == "bfloat16" and case.in_bfloat16 else case.results
    assert types(results) == [{"H": dtype, "F": "float32"}.get(each, each) for each in expected.split()]
    values = values_of(case, plain=True)
    known, known_grads = compute_case(case, PLAIN, values, *activations(values))
    for one, other in zip([*results, *grads], [*known, *known_grads[: len(grads)]], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            found, wanted = (np.float32(tf.convert_to_tensor(each)) for each in (one, other))
            scale = max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(found, wanted, rtol=error, atol=error * scale)


def activations(values: list[Any]) -> list[tf.Tensor]:
    return [value for value in values if not isinstance(value, tf.Variable)]
