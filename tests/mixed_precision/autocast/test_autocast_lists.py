"""The lists of ops, and what else counts for the type of an op: arrays and numbers, variables, casts that are named.

The lists are TensorFlow's but for some, are those of the documentation, and can be changed for a scope.
"""

import pathlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Row, Way, assert_as_plain, assert_row, each_row, each_way, types, within
from kerases import for_every_keras

import tfmp

_HEADER = "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
_METHODS = {"allow": "AllowList", "infer": "InferList", "deny": "DenyList", "clear": "ClearList"}
_TENSOR_LIST_OPS = "AddTensorListOps"
_PAGE = pathlib.Path(__file__).parents[3] / "docs" / "reference" / "autocast_ops.md"


def _names(text: str) -> set[str]:
    named = re.findall(r'"([A-Z]\w*)"', text)
    return {name for name in named if name != name.upper() and hasattr(tf.raw_ops, name)}


def _lists_of_header() -> dict[str, set[str]]:
    """Return the lists for float16, without the ops of custom kernels."""
    header = (pathlib.Path(tf.sysconfig.get_include()) / _HEADER).read_text()
    (body,) = re.findall(r"class AutoMixedPrecisionLists(?:Fp16|Cuda) : .*?\n};", header, re.DOTALL)
    body = re.sub(r"if \(use_onednn_\) \{.*?\}", "", body, flags=re.DOTALL)
    (tensor_lists,) = re.findall(rf"static void {_TENSOR_LIST_OPS}.*?\n  }}", header, re.DOTALL)
    found = {}
    for name, method in _METHODS.items():
        (text,) = re.findall(rf"FlatSet<string> {method}\(\) override \{{.*?return list;", body, re.DOTALL)
        found[name] = _names(text) | (_names(tensor_lists) if f"{_TENSOR_LIST_OPS}(" in text else set())
    return found


def _table() -> list[tuple[list[str], str, str, str]]:
    """Return the rows of the page: ops, their list, that of TensorFlow, and the reason."""
    rows = [line.strip("|").split(" | ") for line in _PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", ops), own.strip("` "), other, reason) for ops, own, other, _, reason in rows]


def test_page_has_each_op_of_the_lists_and_of_tensorflow_with_its_list_that_of_tensorflow_and_a_reason() -> None:
    rows = _table()
    lists = tfmp.mixed_precision.autocast_lists()._asdict().items()
    assert sorted((op, own) for ops, own, _, _ in rows for op in ops) == sorted(
        (op, own) for own, ops in lists for op in ops
    )
    known = {op: name for name, ops in _lists_of_header().items() for op in ops}
    # The header was read.
    assert {"TensorListStack", "Conv3D", "Exp", "Log"} <= known.keys() <= {op for ops, _, _, _ in rows for op in ops}
    assert [op for ops, _, other, _ in rows for op in ops if known.get(op, "-") != other] == []
    assert [ops for ops, _, _, reason in rows if not reason.strip().endswith(".")] == []


def test_an_op_stands_in_one_list_of_both_types_and_tensorflow_has_it() -> None:
    lists = tfmp.mixed_precision.autocast_lists()
    assert lists == tfmp.mixed_precision.autocast_lists("float16") == tfmp.mixed_precision.autocast_lists("bfloat16")
    assert {type(ops) for ops in lists} == {frozenset}
    ops = [op for ops in lists for op in ops]
    assert len(ops) == len(set(ops))
    assert [op for op in ops if not hasattr(tf.raw_ops, op)] == []


@pytest.mark.parametrize("dtype", ["half", tf.float16, np.float16, tf.bfloat16, tf.bfloat16.as_numpy_dtype])
def test_type_can_be_given_in_each_way(dtype: Any) -> None:
    with tfmp.autocast(dtype):
        product = tf.ones([1, 1]) @ tf.ones([1, 1])
    assert product.dtype == tf.as_dtype(dtype)
    assert tfmp.mixed_precision.autocast_lists(dtype) == tfmp.mixed_precision.autocast_lists(tf.as_dtype(dtype))


@pytest.mark.parametrize(
    ("op", "compute", "own"),
    [
        ("Exp", tf.exp, "float32"),
        ("MatMul", lambda x: tf.matmul(x, x), "float16"),
        ("Erf", tf.math.erf, "float16"),
        ("Tanh", tf.tanh, "float32"),
        ("Abs", tf.abs, "float16"),
        ("Cumsum", tf.cumsum, "float32"),
    ],
    ids=["deny", "allow", "infer", "gates", "clear", "unlisted"],
)
def test_op_of_each_list_can_be_moved_to_each(op: str, compute: Any, own: str) -> None:
    half = tf.ones([2, 2], tf.float16)
    for names, expected in [({}, own), ({"half": [op]}, "float16"), ({"float32": [op]}, "float32")]:
        with tfmp.autocast(**names):
            assert compute(half).dtype == expected
    with tfmp.autocast(widest=[op]):
        assert (compute(half).dtype, compute(tf.ones([2, 2])).dtype) == (tf.float16, tf.float32)


def test_names_can_come_from_any_iterable_and_are_those_of_the_innermost_scope() -> None:
    x = tf.ones([2, 2])
    with tfmp.autocast("bfloat16", half=["Exp"]), tfmp.autocast(float32=["MatMul"]):
        assert (tf.exp(x).dtype, (x @ x).dtype) == (tf.float32, tf.float32)
    for names in (("Exp", "Pow"), {"Exp", "Pow"}, iter(["Exp", "Pow"])):
        with tfmp.autocast(half=names):
            assert (tf.exp(x).dtype, tf.pow(x, 2).dtype) == (tf.float16, tf.float16)


_WAYS = "eager function"
_EYE = np.eye(2, dtype=np.float32)
_EACH_TYPE = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])

#: What is computed of a matrix, and the type of the result for one that is a product.
_ARRAYS_AND_NUMBERS: dict[str, tuple[Callable[[tf.Tensor], Any], str]] = {
    "multiplied by float64 array": (lambda x: tf.multiply(x, np.ones([2])), "H"),
    "multiplied by float64 number": (lambda x: tf.multiply(x, np.float64(0.5)), "H"),
    "multiplied by integers": (lambda x: tf.multiply(x, np.arange(2)), "H"),
    "powered": (lambda x: tf.pow(x, np.int64(2)), "F"),
    "where array": (lambda x: tf.where(x > 1, x, np.zeros([2])), "H"),
    "concat with array": (lambda x: tf.concat([x, np.ones([1, 2])], np.int64(0)), "H"),
    "stacked with array": (lambda x: tf.stack([x, np.ones([2, 2])]), "H"),
    "list with numbers": (lambda x: tf.maximum(x, [np.float64(1.5), 2.5]), "H"),
    "reshaped by numbers of numpy": (lambda x: tf.reshape(x, [np.int32(1), np.int64(4)]), "H"),
    "reshaped by a product": (lambda x: tf.reshape(x, [-1, np.prod(x.shape[1:])]), "H"),
    "reduced over numbers of numpy": (lambda x: tf.reduce_max(x, [np.int64(0)]), "H"),
    "clipped": (lambda x: tf.clip_by_value(x, np.float64(0), np.array(2.5)), "H"),
    "shifted by arrays": (lambda x: (x - np.array([1.0, 2.0])) / np.array([0.5, 0.25]), "H"),
    "list subtracted": (lambda x: x - [1.0, 2.0], "H"),
    "atan2": (lambda x: tf.math.atan2(x, np.float64(1.0)), "F"),
}


def _state(x: tf.Tensor, w: Any) -> Any:
    half = x @ x
    w.assign(half)
    w.assign_add(half * 3.0)
    w.assign_sub(half)
    assigned = w * 1.0
    w.scatter_update(tf.IndexedSlices(half[:1], tf.constant([0])))
    w.scatter_nd_add([[0]], half[:1])
    w[1].assign(half[0])
    return [half, assigned, w * tf.reduce_sum(w)]


def _quotients(x: tf.Tensor, _: Any) -> Any:
    """Return what would overflow, or become 0, if the large numbers, or the quotients, were in half precision."""
    half, large = x @ _EYE, tf.constant([1e6, 2e6])
    quotients = [half / large, tf.math.divide(half, large), tf.math.divide_no_nan(half, large), half * (1 / large)]
    return [*quotients, large % half, tf.math.floormod(half, large), tf.reduce_sum(tf.fill([8, 1], 4e4) @ half[:1, :1])]


def _sparse_and_ragged(x: tf.Tensor, _: Any) -> Any:
    product = tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(x), x @ x)
    return product, tf.reduce_sum(tf.ragged.constant([[1.0], [2.0, 3.0]]) * 2.0)


_ROWS = {
    **{name: Row(within(lambda x, _, of=of: of(x)), "F", _WAYS) for name, (of, _) in _ARRAYS_AND_NUMBERS.items()},
    **{
        f"product {name}": Row(within(lambda x, _, of=of: of(x @ _EYE)), type_, _WAYS)
        for name, (of, type_) in _ARRAYS_AND_NUMBERS.items()
    },
    "state": Row(within(_state), "H F F", _WAYS),
    "quotients": Row(within(_quotients), "F F F F F F F"),
    "sparse and ragged": Row(within(_sparse_and_ragged), "F F"),
    "Python functions": Row(
        within(lambda x, _: [each(lambda x: x @ x, [x], tf.float32) for each in (tf.py_function, tf.numpy_function)]),
        "F F",
    ),
}


@each_row(_ROWS)
def test_code_computes_in_a_scope_as_in_none(row: Row, way: str) -> None:
    assert_row(row, way)


def test_static_shapes_are_those_of_none() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2, 3])])
    @tfmp.autocast()
    def compute(x: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(x, [-1, np.prod(x.shape[1:])])
        tiled = tf.tile(flat, [1, np.int32(2)])
        assert (flat.shape.as_list(), tiled.shape.as_list()) == ([None, 6], [None, 12])
        return tf.reshape(tiled, [np.int32(-1), np.int64(3), 4])

    assert compute.get_concrete_function().structured_outputs.shape.as_list() == [None, 3, 4]


_WITH_KERAS: dict[str, Callable[..., Any]] = {
    "product": lambda half, layer: tf.matmul(half, layer.kernel),
    "sum": lambda half, layer: half + layer.bias,
    "list": lambda half, layer: tf.add_n([half, layer.kernel]),
    "bias": lambda half, layer: tf.nn.bias_add(half, layer.bias),
    "first": lambda half, layer: tf.maximum(layer.bias, half),
    "converted": lambda half, layer: half + tf.convert_to_tensor(layer.bias),
}


@for_every_keras()
@each_way
@pytest.mark.parametrize("name", _WITH_KERAS)
def test_variable_of_keras_is_a_weight(keras: ModuleType, way: Way, name: str) -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    layer.bias.assign([0.5, 0.25])
    result = way(tfmp.autocast()(lambda x: _WITH_KERAS[name](x @ _EYE, layer)))(tf.ones([2, 2]))
    assert_as_plain(result, _WITH_KERAS[name](tf.ones([2, 2]), layer), ["float16"], 2e-3)


def test_error_of_a_function_that_float32_does_not_mend_is_its_own() -> None:
    with tfmp.autocast(), pytest.raises(ValueError, match="must be a scalar tensor or a float"):
        tf.nn.dropout(tf.ones([2, 2]) @ tf.ones([2, 2]), rate=7)


def test_functions_of_the_user_are_not_called_again() -> None:
    calls = []

    def fails(x: tf.Tensor) -> tf.Tensor:
        calls.append(x)
        raise TypeError("no such row")

    with tfmp.autocast(), pytest.raises(TypeError, match="no such row"):
        tf.map_fn(fails, tf.ones([2, 2]) @ tf.ones([2, 2]))
    assert len(calls) == 1


@_EACH_TYPE
def test_dropout_keeps_the_type_and_drops_as_many(dtype: str) -> None:
    with tfmp.autocast(dtype):
        half = tf.ones([32, 32]) @ np.eye(32, dtype=np.float32)
        results = [tf.nn.dropout(half, 0.5, seed=1), tf.nn.experimental.stateless_dropout(half, 0.5, seed=[1, 2])]
    for result in results:
        assert result.dtype == dtype
        assert set(np.unique(np.float32(result))) == {0.0, 2.0}
        assert 0.4 < np.mean(np.float32(result) == 0) < 0.6


def test_types_that_are_asked_for_are_given() -> None:
    with tfmp.autocast():
        half = tf.ones([1, 2]) @ tf.ones([2, 2])
        made = [tf.random.normal([2]), tf.random.normal([2], dtype=tf.float64), tf.random.categorical(half, 3)]
        cast = [tf.cast(half, dtype) for dtype in (tf.float32, tf.float64, tf.bfloat16, tf.int32)]
    assert types(made) == ["float32", "float64", "int64"]
    assert types(cast) == ["float32", "float64", "bfloat16", "int32"]
