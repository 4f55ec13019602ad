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
from autocast_ways import Way, assert_as_plain, each_way, matrix, types
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


def test_lists_are_those_of_tensorflow_but_for_what_the_ends_of_nets_need_in_float32() -> None:
    found, lists = _lists_of_header(), tfmp.mixed_precision.autocast_lists()
    # The header was read.
    assert {"TensorListStack", "Conv3D"} <= found["clear"] | found["allow"]
    assert lists.allow - found["allow"] == {"BatchMatMulV3", "FusedPadConv2D"}
    assert found["allow"] < lists.allow
    assert lists.clear == found["clear"]
    assert found["deny"] < lists.deny
    assert lists.infer < found["infer"]
    assert lists.gates < found["infer"]
    assert found["infer"] - lists.infer - lists.gates == {
        *("Inv", "Log", "Log1p", "LogSoftmax", "Prod", "Reciprocal", "Softmax", "Softplus", "Sqrt")
    }


def _table() -> list[tuple[list[str], str, str, str]]:
    """Return the rows of the page: ops, their list, that of TensorFlow, and the reason."""
    rows = [line.strip("|").split(" | ") for line in _PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", ops), own.strip("` "), other, reason) for ops, own, other, _, reason in rows]


def test_table_in_the_documentation_has_each_op_with_its_list_that_of_tensorflow_and_a_reason() -> None:
    rows = _table()
    lists = tfmp.mixed_precision.autocast_lists()._asdict().items()
    assert sorted((op, own) for ops, own, _, _ in rows for op in ops) == sorted(
        (op, own) for own, ops in lists for op in ops
    )
    known = {op: name for name, ops in _lists_of_header().items() for op in ops}
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


_EYE = np.eye(2, dtype=np.float32)
_EACH_TYPE = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])

_ARRAYS_AND_NUMBERS: dict[str, Callable[[tf.Tensor], Any]] = {
    "multiplied by float64 array": lambda x: tf.multiply(x, np.ones([2])),
    "multiplied by float64 number": lambda x: tf.multiply(x, np.float64(0.5)),
    "multiplied by integers": lambda x: tf.multiply(x, np.arange(2)),
    "powered": lambda x: tf.pow(x, np.int64(2)),
    "where array": lambda x: tf.where(x > 1, x, np.zeros([2])),
    "concat with array": lambda x: tf.concat([x, np.ones([1, 2])], np.int64(0)),
    "stacked with array": lambda x: tf.stack([x, np.ones([2, 2])]),
    "list with numbers": lambda x: tf.maximum(x, [np.float64(1.5), 2.5]),
    "reshaped by numbers of numpy": lambda x: tf.reshape(x, [np.int32(1), np.int64(4)]),
    "reshaped by a product": lambda x: tf.reshape(x, [-1, np.prod(x.shape[1:])]),
    "reduced over numbers of numpy": lambda x: tf.reduce_max(x, [np.int64(0)]),
    "clipped": lambda x: tf.clip_by_value(x, np.float64(0), np.array(2.5)),
    "shifted by arrays": lambda x: (x - np.array([1.0, 2.0])) / np.array([0.5, 0.25]),
    "list subtracted": lambda x: x - [1.0, 2.0],
    "atan2": lambda x: tf.math.atan2(x, np.float64(1.0)),
}


@each_way
@pytest.mark.parametrize("name", _ARRAYS_AND_NUMBERS)
def test_arrays_and_numbers_take_the_type_of_the_tensor_as_without_autocast(name: str, way: Way) -> None:
    compute = _ARRAYS_AND_NUMBERS[name]
    scope = tfmp.autocast()
    expected = way(compute)(matrix())
    assert_as_plain(way(scope(compute))(matrix()), expected, ["float32"])
    # With a product, which is half precision, only the values are those.
    of_product = way(scope(lambda x: compute(x @ _EYE)))(matrix())
    np.testing.assert_allclose(np.float32(of_product), expected, rtol=1e-3)


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


def test_half_precision_takes_place_and_not_only_its_type() -> None:
    x, one = tf.constant([[1.0 + 2**-12]]), tf.ones([1, 1])
    with tfmp.autocast():
        assert ((x @ one).numpy().item(), (x + one).numpy().item()) == (1, 2 + 2**-12)
        assert float(tf.reduce_sum(tf.fill([8], 40000.0) * (one @ one)[0])) == 320000
        # What float16 cannot hold is infinite, and refused nowhere.
        assert np.isinf((300.0 * one @ (300.0 * one)).numpy()).all()
    with tfmp.autocast("bfloat16"):
        assert ((1 + 2**-9) * one @ one).numpy().item() == 1


def test_quotient_by_a_large_number_does_not_overflow_on_its_way() -> None:
    large = tf.constant([1e6, 2e6])
    with tfmp.autocast():
        half = tf.ones([1, 1]) @ tf.ones([1, 2])
        quotients = [half / large, tf.math.divide(half, large), tf.math.divide_no_nan(half, large), half * (1 / large)]
        remainders = [large % half[0], tf.math.floormod(half, large)]
    for quotient in quotients:
        np.testing.assert_allclose(quotient, [[1e-6, 5e-7]], rtol=1e-6)
    np.testing.assert_allclose(remainders[0], [0, 0])
    np.testing.assert_allclose(remainders[1], [[1, 1]])


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


@each_way
def test_state_keeps_its_type(way: Way) -> None:
    v, rows = tf.Variable(tf.zeros([2, 2])), tf.Variable(tf.zeros([3, 2]))

    @tfmp.autocast()
    def update(x: tf.Tensor) -> tf.Tensor:
        half = x @ x
        v.assign(half)
        v.assign_add(half * 3.0)
        v.assign_sub(half)
        rows.scatter_update(tf.IndexedSlices(half, tf.constant([0, 2])))
        rows.scatter_nd_add([[0]], half[:1])
        rows[1].assign(half[0])
        return [half, v * tf.reduce_sum(v)]

    assert types(way(update)(tf.ones([2, 2]))) == ["float16", "float32"]
    assert v.numpy().tolist() == [[6, 6], [6, 6]]
    assert rows.numpy().tolist() == [[4, 4], [2, 2], [2, 2]]


def test_types_that_are_asked_for_are_given() -> None:
    with tfmp.autocast():
        half = tf.ones([1, 2]) @ tf.ones([2, 2])
        made = [tf.random.normal([2]), tf.random.normal([2], dtype=tf.float64), tf.random.categorical(half, 3)]
        cast = [tf.cast(half, dtype) for dtype in (tf.float32, tf.float64, tf.bfloat16, tf.int32)]
    assert types(made) == ["float32", "float64", "int64"]
    assert types(cast) == ["float32", "float64", "bfloat16", "int32"]


def test_sparse_and_ragged_tensors_are_computed_with() -> None:
    dense = tf.constant([[1.0, 0.0], [0.0, 2.0]])
    with tfmp.autocast():
        product = tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(dense), dense @ dense)
        total = tf.reduce_sum(tf.ragged.constant([[1.0], [2.0, 3.0]]) * 2.0)
    assert_as_plain([product, total], [tf.constant([[1, 0], [0, 8]]), tf.constant(12)], ["float32", "float32"])
