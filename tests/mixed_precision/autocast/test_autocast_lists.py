"""The lists of ops are TensorFlow's but for some, are those of the documentation, and can be changed for a scope."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

_HEADER = "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
_METHODS = {"allow": "AllowList", "infer": "InferList", "deny": "DenyList", "clear": "ClearList"}
_TENSOR_LIST_OPS = "AddTensorListOps"
_PAGE = pathlib.Path(__file__).parents[3] / "docs" / "reference" / "autocast_ops.md"


def _header() -> str:
    return (pathlib.Path(tf.sysconfig.get_include()) / _HEADER).read_text()


def _names(text: str) -> set[str]:
    named = re.findall(r'"([A-Z]\w*)"', text)
    return {name for name in named if name != name.upper() and hasattr(tf.raw_ops, name)}


def _lists_of_header() -> dict[str, set[str]]:
    """Return the lists for float16, without the ops of custom kernels."""
    header = _header()
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
        *("Inv", "Log", "Log1p", "LogSoftmax", "Prod", "Reciprocal", "Softmax", "Softplus", "Sqrt"),
    }


def _table() -> list[tuple[list[str], str, str, str]]:
    """Return the rows of the page: ops, their list, that of TensorFlow, and the reason."""
    rows = [line.strip("|").split(" | ") for line in _PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", ops), own.strip("` "), other, reason) for ops, own, other, _, reason in rows]


def test_table_in_the_documentation_has_each_op_with_its_list_and_a_reason() -> None:
    listed = [(op, own) for ops, own, _, _ in _table() for op in ops]
    assert sorted(listed) == sorted(
        (op, name) for name, ops in tfmp.mixed_precision.autocast_lists()._asdict().items() for op in ops
    )
    assert [ops for ops, _, _, reason in _table() if not reason.strip().endswith(".")] == []


def test_table_in_the_documentation_has_the_lists_of_tensorflow() -> None:
    known = {op: name for name, ops in _lists_of_header().items() for op in ops}
    wrong = [op for ops, _, other, _ in _table() for op in ops if known.get(op, "-") != other]
    assert wrong == []


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


def _result(argument: str, op: str, compute: Any, dtype: str = "float16") -> str:
    half = tf.cast(tf.fill([2, 2], 0.5), dtype)
    names: dict[str, Any] = {argument: [op]}
    with tfmp.autocast(dtype, **names):
        return compute(half).dtype.name


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
    with tfmp.autocast():
        assert compute(tf.ones([2, 2], tf.float16)).dtype == own
    assert _result("half", op, compute) == "float16"
    assert _result("float32", op, compute) == "float32"
    assert _result("widest", op, compute) == "float16"


def test_op_named_half_computes_so_for_float32_inputs() -> None:
    x = tf.fill([2, 2], 0.5)
    with tfmp.autocast(half=["Exp"]):
        assert tf.exp(x).dtype == tf.float16
    with tfmp.autocast(widest=["MatMul"]):
        assert tf.matmul(x, x).dtype == tf.float32


def test_names_can_come_from_any_iterable() -> None:
    x = tf.ones([2, 2])
    with tfmp.autocast("bfloat16", half=["Exp"]), tfmp.autocast(float32=["MatMul"]):
        # An inner scope has lists of its own.
        assert (tf.exp(x).dtype, (x @ x).dtype) == (tf.float32, tf.float32)
    for names in (("Exp", "Pow"), {"Exp", "Pow"}, (name for name in ["Exp", "Pow"]), iter(["Exp", "Pow"])):
        with tfmp.autocast(half=names):
            assert (tf.exp(x).dtype, tf.pow(x, 2).dtype) == (tf.float16, tf.float16)


def test_lists_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype must be a half-precision type, float16 or bfloat16, got tf\.int32"):
        tfmp.mixed_precision.autocast_lists(tf.int32)
