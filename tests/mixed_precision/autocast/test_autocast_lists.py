"""The lists are TensorFlow's, and arguments that cannot be meant are refused before anything is replaced."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import op_def_library

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


def test_header_is_read() -> None:
    found = _lists_of_header()
    assert {name: len(ops) > 5 for name, ops in found.items()} == dict.fromkeys(_METHODS, True)
    assert "TensorListStack" in found["clear"]
    assert "Conv3D" in found["allow"]


def test_lists_are_those_of_tensorflow_but_for_what_the_ends_of_nets_need_in_float32() -> None:
    found, lists = _lists_of_header(), tfmp.mixed_precision.autocast_lists()
    assert lists.allow - found["allow"] == {"BatchMatMulV3", "FusedPadConv2D"}
    assert found["allow"] < lists.allow
    assert lists.clear == found["clear"]
    assert found["deny"] < lists.deny
    assert lists.infer < found["infer"]
    assert lists.gates < found["infer"]
    assert found["infer"] - lists.infer - lists.gates == {
        *("Inv", "Log", "Log1p", "LogSoftmax", "Prod", "Reciprocal", "Softmax", "Softplus", "Sqrt"),
    }


def test_both_types_have_the_same_lists() -> None:
    assert (
        tfmp.mixed_precision.autocast_lists("bfloat16")
        == tfmp.mixed_precision.autocast_lists("float16")
        == tfmp.mixed_precision.autocast_lists()
    )


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_op_stands_in_one_list_and_tensorflow_has_it(dtype: str) -> None:
    ops = [op for ops in tfmp.mixed_precision.autocast_lists(dtype) for op in ops]
    assert len(ops) == len(set(ops))
    assert [op for op in ops if not hasattr(tf.raw_ops, op)] == []


@pytest.mark.parametrize("dtype", ["half", tf.float16, np.float16, tf.bfloat16, tf.bfloat16.as_numpy_dtype])
def test_type_can_be_given_in_each_way(dtype: Any) -> None:
    with tfmp.autocast(dtype):
        product = tf.ones([1, 1]) @ tf.ones([1, 1])
    assert product.dtype == tf.as_dtype(dtype)
    assert tfmp.mixed_precision.autocast_lists(dtype) == tfmp.mixed_precision.autocast_lists(tf.as_dtype(dtype))


def test_lists_that_are_returned_change_nothing() -> None:
    lists = tfmp.mixed_precision.autocast_lists()
    assert {type(ops) for ops in lists} == {frozenset}
    lists._replace(allow=frozenset())
    assert "MatMul" in tfmp.mixed_precision.autocast_lists().allow


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


def test_scopes_within_each_other_have_their_own_lists() -> None:
    x = tf.ones([2, 2])
    with tfmp.autocast("bfloat16", half=["Exp"]):
        before = tf.exp(x)
        with tfmp.autocast(float32=["MatMul"]):
            within = [tf.exp(x), x @ x]
        after = tf.exp(x)
    assert [each.dtype.name for each in [before, *within, after]] == ["bfloat16", "float32", "float32", "bfloat16"]


def test_names_can_come_from_any_iterable() -> None:
    x = tf.ones([2, 2])
    for names in (("Exp", "Pow"), {"Exp", "Pow"}, (name for name in ["Exp", "Pow"]), iter(["Exp", "Pow"])):
        with tfmp.autocast(half=names):
            assert (tf.exp(x).dtype, tf.pow(x, 2).dtype) == (tf.float16, tf.float16)


_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dtype": "float32"}, ValueError, "float16 or bfloat16, got 'float32'"),
    ({"dtype": tf.float64}, ValueError, "float16 or bfloat16, got tf.float64"),
    ({"dtype": "int8"}, ValueError, "got 'int8'"),
    ({"dtype": "float8_e5m2"}, ValueError, "got 'float8_e5m2'"),
    ({"dtype": "fp16"}, ValueError, "got 'fp16'"),
    ({"dtype": "mixed_float16"}, ValueError, "got 'mixed_float16'"),
    ({"dtype": None}, ValueError, "got None"),
    ({"dtype": True}, ValueError, "got True"),
    ({"dtype": ["float16"]}, ValueError, re.escape("got ['float16']")),
    ({"dtype": "float32", "enabled": False}, ValueError, "got 'float32'"),
    ({"enabled": "False"}, TypeError, "enabled must be True or False, got 'False' of type str"),
    ({"half": "Exp"}, TypeError, "half must be a list of names, got 'Exp' of type str"),
    ({"float32": "MatMul"}, TypeError, "float32 must be a list of names"),
    ({"widest": ""}, TypeError, "widest must be a list of names"),
    ({"half": None}, TypeError, "half must be a list of names"),
    ({"half": 3}, TypeError, "half must be a list of names"),
    ({"half": ["Matmul"]}, ValueError, "half names 'Matmul'.*did you mean.*MatMul"),
    ({"float32": ["Softmaxx"]}, ValueError, "float32 names 'Softmaxx'.*did you mean.*Softmax"),
    ({"widest": ["exp"]}, ValueError, "widest names 'exp'.*did you mean.*Exp"),
    ({"half": ["matmul"]}, ValueError, "half names 'matmul'.*did you mean.*MatMul"),
    pytest.param({"half": [tf.exp]}, TypeError, "half must be a list of names, and has <function exp", id="function"),
    ({"half": ["MatMul", "xyzzy_qq"]}, ValueError, "half names 'xyzzy_qq'.*see dir"),
    ({"half": ["Exp", None]}, TypeError, "half must be a list of names, and has None of type NoneType"),
    ({"half": [["Exp"]]}, TypeError, re.escape("half must be a list of names, and has ['Exp'] of type list")),
    ({"half": ["Cast"]}, ValueError, "half names 'Cast', which returns the type that it is asked for: leave it out"),
    ({"half": ["Exp"], "widest": ["Exp"]}, ValueError, "Exp stands in half and widest: leave it in one of them"),
    ({"half": ["Sum"], "float32": ["Sum"], "widest": ["Sum"]}, ValueError, "Sum stands in half and float32 and widest"),
    ({"half": ["Expp"], "enabled": False}, ValueError, "half names 'Expp'"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), _REFUSED, ids=[str(arguments) for arguments, _, _ in _REFUSED]
)
def test_arguments_that_cannot_be_meant_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = (pywrap_tfe.TFE_Py_FastPathExecute, op_def_library._apply_op_helper)
    with pytest.raises(error, match=message), tfmp.autocast(**arguments):
        pass
    assert (pywrap_tfe.TFE_Py_FastPathExecute, op_def_library._apply_op_helper) == before
    assert (tf.ones([1, 1]) @ tf.ones([1, 1])).dtype == tf.float32


@pytest.mark.parametrize("dtype", ["float32", None, "fp8", tf.int32])
def test_lists_of_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be a half-precision type, float16 or bfloat16, got"):
        tfmp.mixed_precision.autocast_lists(dtype)
